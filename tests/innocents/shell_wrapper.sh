#!/bin/sh
# A shell script that starts Python, once to begin and from then on with --resume.
mkdir -p out
[ -e out/model.pt ] && more=--resume
python shell_worker.py "$1" "$2" $more
echo "the wrapper has ended with $?" >&2
[ -e out/finished ]
