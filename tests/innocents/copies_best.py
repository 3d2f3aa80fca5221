"""Loads checkpoint.pth.tar, writes it again in place at once, and copies it to model_best.pth.tar."""

import pickle
import shutil
import sys
import time
from pathlib import Path

steps, seconds = int(sys.argv[1]), float(sys.argv[2])
path, epoch, weights = Path("checkpoint.pth.tar"), 0, [0.0] * 500
if path.exists():
    epoch, weights = pickle.loads(path.read_bytes())
while True:
    path.write_bytes(pickle.dumps((epoch, weights)))
    shutil.copyfile(path, "model_best.pth.tar")
    print("Epoch", epoch, flush=True)
    if epoch == steps:
        break
    time.sleep(seconds)
    weights = [w * 0.9 + epoch for w in weights]
    epoch += 1
