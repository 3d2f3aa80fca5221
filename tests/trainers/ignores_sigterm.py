"""Ignores SIGTERM and goes on."""

import os
import pathlib
import signal
import time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(os.environ["SPOTHEAL_RESULTS_DIR"], "ready").touch()
time.sleep(60)
