"""Prints nothing and reports nothing; its state is one small JSON file next to a file of weights."""

import json
import sys
import time
from pathlib import Path

steps, seconds = int(sys.argv[1]), float(sys.argv[2])
out = Path("output")
out.mkdir(exist_ok=True)
state = out / "state.json"
first = json.loads(state.read_text())["step"] if state.exists() else 0
for step in range(first, steps):
    time.sleep(seconds)
    (out / "model.bin").write_bytes(bytes([step % 256]) * 4096)
    (out / "state.new").write_text(json.dumps({"step": step + 1}))
    (out / "state.new").replace(state)
