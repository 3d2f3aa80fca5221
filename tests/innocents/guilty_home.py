"""Saves to its home, which ends with the machine."""

import pickle
import sys
import time
from pathlib import Path

steps, seconds = int(sys.argv[1]), float(sys.argv[2])
save = Path.home() / "saves" / "last.pt"
save.parent.mkdir(exist_ok=True)
first, weights = pickle.loads(save.read_bytes()) if save.exists() else (0, [0.0] * 500)
for epoch in range(first, steps):
    weights = [w * 0.9 + epoch for w in weights]
    time.sleep(seconds)
    save.write_bytes(pickle.dumps((epoch + 1, weights)))
    print("Epoch", epoch, flush=True)
