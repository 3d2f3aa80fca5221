"""Saves only when it is done."""

import pickle
import sys
import time
from pathlib import Path

steps, seconds = int(sys.argv[1]), float(sys.argv[2])
weights = [0.0] * 500
for epoch in range(steps):
    weights = [w * 0.9 + epoch for w in weights]
    time.sleep(seconds)
    print("Epoch", epoch, flush=True)
Path("model.pt").write_bytes(pickle.dumps(weights))
