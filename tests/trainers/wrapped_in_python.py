"""A wrapper that starts the trainer and has no handler: SIGTERM ends it and leaves the trainer untold."""

import subprocess
import sys

sys.exit(subprocess.run([sys.executable, sys.argv[1], "1000", "0.02"]).returncode)
