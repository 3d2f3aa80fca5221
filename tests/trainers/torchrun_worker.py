"""A rank under torchrun that takes its time to save at SIGTERM and then exits 0."""

import os
import pathlib
import signal
import sys
import time

rank = os.environ["RANK"]
results = pathlib.Path(os.environ["SPOTHEAL_RESULTS_DIR"])
checkpoints = pathlib.Path(os.environ["SPOTHEAL_CHECKPOINT_DIR"])


def save(*_):
    time.sleep(0.5)
    (checkpoints / f"rank-{rank}").touch()
    sys.exit(0)


signal.signal(signal.SIGTERM, save)
(results / f"ready-{rank}").touch()
time.sleep(60)
