"""Saves weights/epoch_003.pt, one file an epoch, and goes on after the newest."""

import glob
import pickle
import sys
import time
from pathlib import Path

steps, seconds = int(sys.argv[1]), float(sys.argv[2])
Path("weights").mkdir(exist_ok=True)
saves = sorted(glob.glob("weights/epoch_*.pt"))
weights, first = [0.0] * 500, 0
if saves:
    weights = pickle.loads(Path(saves[-1]).read_bytes())
    first = int(saves[-1][-6:-3]) + 1
for epoch in range(first, steps):
    weights = [w * 0.9 + epoch for w in weights]
    time.sleep(seconds)
    Path("weights/half").write_bytes(pickle.dumps(weights))
    Path("weights/half").replace(f"weights/epoch_{epoch:03d}.pt")
    print(f"Epoch {epoch + 1}/{steps}", flush=True)
