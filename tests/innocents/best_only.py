"""Keeps best.pt alone, written when the loss falls, with the epoch in it."""

import pickle
import sys
import time
from pathlib import Path

steps, seconds = int(sys.argv[1]), float(sys.argv[2])
best, state = Path("best.pt"), {"epoch": 0, "loss": 1e9, "weights": [1.0] * 500}
if best.exists():
    state = pickle.loads(best.read_bytes())
weights = state["weights"]
for epoch in range(state["epoch"] + 1, steps + 1):
    weights = [w / 2 for w in weights]
    loss = 1.0 / epoch
    time.sleep(seconds)
    print(f"epoch={epoch} loss={loss:.3f}", flush=True)
    if loss < state["loss"]:
        state = {"epoch": epoch, "loss": loss, "weights": weights}
        Path("best.new").write_bytes(pickle.dumps(state))
        Path("best.new").replace(best)
