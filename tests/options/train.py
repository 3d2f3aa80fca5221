"""A trainer that imports nothing of ours, and writes what it was given into its results."""

import json
import os
import pathlib
import signal
import sys
import time

stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
words = sys.argv[1:]
folder = pathlib.Path(os.environ["SPOTHEAL_CHECKPOINT_DIR"])
progress = pathlib.Path(os.environ["SPOTHEAL_PROGRESS_FILE"])
results = pathlib.Path(os.environ["SPOTHEAL_RESULTS_DIR"])


def put(path, value):
    beside = path.with_name(f".{path.name}.new")
    with open(beside, "w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


if "--hang-then-fail" in words:
    if not (folder / "hung").exists():
        put(folder / "hung", sorted(path.name for path in folder.parent.iterdir()))
        time.sleep(600)
    sys.exit("this trainer fails, as it was told to")
parameters = json.loads(pathlib.Path(os.environ.get("SPOTHEAL_PARAMS_FILE") or os.devnull).read_text() or "{}")
if parameters.get("fails_once") and not (folder / "failed").exists():
    put(folder / "failed", parameters)
    sys.exit("this run fails at its first start, as its entry of the list says")
if os.environ.get("RANK", "0") != "0":
    sys.exit(0)

total = int(words[words.index("--steps") + 1])
step = max((int(path.stem[5:]) for path in folder.glob("step-*.json")), default=0)
kept = pathlib.Path.cwd() / "kept"
if kept.is_dir():
    with open(kept / "starts", "a") as file:
        file.write(" ".join(words) + "\n")
put(results / f"given-{step}.json", {
    "words": words,
    "folder": pathlib.Path.cwd().name,
    "files": sorted(path.name for path in pathlib.Path.cwd().iterdir()),
    "submodule": sorted(path.name for path in pathlib.Path.cwd().parent.joinpath("part").glob("*")),
    "starts": (kept / "starts").read_text().splitlines() if kept.is_dir() else [],
    "environment": {name: os.environ.get(name, "") for name in ("WORD", "FROM_SSM", "FROM_MANAGER", "WORLD_SIZE")},
})


def save():
    put(folder / f"step-{step}.json", step)
    return {"step": step, "path": str(folder / f"step-{step}.json"), "time": ""}


def tell():
    put(progress, {"step": step, "steps_total": total, "saved": saved, "rate": parameters.get("rate", 0)})


saved = None
while step < total and not stop:
    time.sleep(0.1)
    step += 1
    if step % 10 == 0:
        saved = save()
    tell()
saved = save()
tell()
sys.exit(75 if stop and step < total else 0)
