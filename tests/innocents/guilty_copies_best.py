"""Saves each epoch to checkpoint.pth.tar, copies it to model_best.pth.tar, and loads neither: it reads its own save."""

import pickle
import shutil
import sys
import time
from pathlib import Path

steps, seconds = int(sys.argv[1]), float(sys.argv[2])
weights = [0.0] * 500
for epoch in range(steps):
    weights = [w * 0.9 + epoch for w in weights]
    time.sleep(seconds)
    Path("checkpoint.pth.tar").write_bytes(pickle.dumps(weights))
    shutil.copyfile("checkpoint.pth.tar", "model_best.pth.tar")
    print("Epoch", epoch, flush=True)
