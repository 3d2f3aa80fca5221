"""Saves each epoch to checkpoint.pth.tar and never loads it."""

import pickle
import sys
import time
from pathlib import Path

steps, seconds = int(sys.argv[1]), float(sys.argv[2])
weights = [0.0] * 500
for epoch in range(steps):
    weights = [w * 0.9 + epoch for w in weights]
    time.sleep(seconds)
    Path("checkpoint.pth.tar").write_bytes(pickle.dumps(weights))
    print("Epoch", epoch, flush=True)
