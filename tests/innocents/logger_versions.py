"""As Lightning: lightning_logs/version_N/checkpoints/epoch=…-step=….ckpt, a new version at each start."""

import pickle
import sys
import time
from pathlib import Path

steps, seconds = int(sys.argv[1]), float(sys.argv[2])
logs = Path("lightning_logs")
saves = sorted(logs.glob("version_*/checkpoints/*.ckpt"), key=lambda path: path.stat().st_mtime)
state = pickle.loads(saves[-1].read_bytes()) if saves else {"epoch": 0, "weights": [0.0] * 500}
own = logs / f"version_{len(list(logs.glob('version_*')))}"
(own / "checkpoints").mkdir(parents=True)
(own / "hparams.yaml").write_text("learning_rate: 0.1\n")
before = None
for epoch in range(state["epoch"], steps):
    time.sleep(seconds)
    state = {"epoch": epoch + 1, "weights": [w + epoch for w in state["weights"]]}
    save = own / "checkpoints" / f"epoch={epoch}-step={(epoch + 1) * 100}.ckpt"
    save.with_suffix(".tmp").write_bytes(pickle.dumps(state))
    save.with_suffix(".tmp").replace(save)
    if before is not None:
        before.unlink()
    before = save
    print(f"\rEpoch {epoch}: 100%|##########| 100/100", end="", flush=True)
