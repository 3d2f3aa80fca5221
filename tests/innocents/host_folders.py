"""Names its folders after arguments, host and process: runs/lr0.1/<host>-<pid>/last.pt; resumes from the newest."""

import argparse
import os
import pickle
import socket
import time
from pathlib import Path

arguments = argparse.ArgumentParser()
arguments.add_argument("steps", type=int)
arguments.add_argument("seconds", type=float)
arguments.add_argument("--lr", type=float, default=0.1)
options = arguments.parse_args()
top = Path("runs") / f"lr{options.lr}"
saves = sorted(top.glob("*/last.pt"), key=lambda path: path.stat().st_mtime)
state = pickle.loads(saves[-1].read_bytes()) if saves else (0, [0.0] * 500)
own = top / f"{socket.gethostname()}-{os.getpid()}"
own.mkdir(parents=True)
for step in range(state[0], options.steps):
    time.sleep(options.seconds)
    state = step + 1, [w + options.lr for w in state[1]]
    (own / "last.tmp").write_bytes(pickle.dumps(state))
    (own / "last.tmp").replace(own / "last.pt")
    print(f"[{socket.gethostname()}] step {step}", flush=True)
