"""What shell_wrapper.sh starts: resumes only if it is told to."""

import pickle
import sys
import time
from pathlib import Path

steps, seconds = int(sys.argv[1]), float(sys.argv[2])
state = pickle.loads(Path("out/model.pt").read_bytes()) if "--resume" in sys.argv else (0, [0.0] * 500)
for step in range(state[0], steps):
    time.sleep(seconds)
    state = step + 1, [w + step for w in state[1]]
    Path("out/model.part").write_bytes(pickle.dumps(state))
    Path("out/model.part").replace("out/model.pt")
    print("iter", step, flush=True)
Path("out/finished").touch()
