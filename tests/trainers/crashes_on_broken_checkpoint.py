"""Loads the newest checkpoint folder and crashes where it is empty, as HF trainers do after a kill during a save."""

import os
import pathlib

checkpoints = pathlib.Path(os.environ["SPOTHEAL_CHECKPOINT_DIR"])
newest = max(checkpoints.glob("checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1]))
state = (newest / "model.bin").read_bytes()
if not state:
    raise SystemExit("cannot load " + newest.name)
print("loaded", newest.name)
