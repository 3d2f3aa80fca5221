"""One rank of several: says who it is, waits for SIGTERM and saves; with `fail`, rank 1 ends with a traceback."""

import os
import pathlib
import signal
import sys
import time

rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
print(f"rank {rank} of {size} speaks, arguments {sys.argv[1:]}")
pathlib.Path(os.environ["SPOTHEAL_RESULTS_DIR"], f"ready-{rank}").touch()
if "fail" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if rank == "1":
        raise RuntimeError("rank 1 has lost its mind")
    time.sleep(30)
until = time.monotonic() + 30
while not asked and time.monotonic() < until:
    time.sleep(0.02)
pathlib.Path(os.environ["SPOTHEAL_CHECKPOINT_DIR"], f"rank-{rank}").touch()
while len(list(pathlib.Path(os.environ["SPOTHEAL_CHECKPOINT_DIR"]).iterdir())) < int(size):
    time.sleep(0.02)  # none leaves before all have saved
sys.exit(75)
