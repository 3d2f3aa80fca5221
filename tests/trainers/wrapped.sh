#!/bin/bash
# A script that only starts the trainer, as many do; it has no trap, so SIGTERM would end it and leave the trainer untold.
python "$1" 1000 0.02
code=$?
echo "the wrapper saw $code"
exit "$code"
