"""Keeps the contract: saves below $SPOTHEAL_CHECKPOINT_DIR, reports its steps, saves and exits with 75 at SIGTERM."""

import json
import os
import pickle
import signal
import sys
import time
from pathlib import Path

steps, seconds = int(sys.argv[1]), float(sys.argv[2])
save = Path(os.environ["SPOTHEAL_CHECKPOINT_DIR"], "last.pt")
told = Path(os.environ["SPOTHEAL_PROGRESS_FILE"])
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))


def replace(path: Path, content: bytes) -> None:
    new = path.with_suffix(".tmp")
    new.write_bytes(content)
    new.replace(path)


step, weights = pickle.loads(save.read_bytes()) if save.exists() else (0, [0.0] * 500)
saved = step
while True:
    progress = {"step": step, "steps_total": steps, "saved": {"step": saved} if saved else None}
    replace(told, json.dumps(progress).encode())
    if step == steps or asked:
        break
    time.sleep(seconds)
    step, weights = step + 1, [w + step for w in weights]
    if step % 5 == 0 or step == steps or asked:
        replace(save, pickle.dumps((step, weights)))
        saved = step
sys.exit(0 if step == steps else 75)
