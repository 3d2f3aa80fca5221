"""A trainer of the standard library alone: counts steps, saves each, stops at SIGTERM or a notice, resumes.

    count_steps.py SECONDS     one step in so many seconds, until the file datasets/finish is there
"""

import json
import os
import pathlib
import signal
import sys
import time

SECONDS = float(sys.argv[1])
FINISH = pathlib.Path(os.environ["SPOTHEAL_DATASETS_DIR"], "finish")
FOLDER = pathlib.Path(os.environ["SPOTHEAL_CHECKPOINT_DIR"])
PROGRESS = pathlib.Path(os.environ["SPOTHEAL_PROGRESS_FILE"])
NOTICE = pathlib.Path(os.environ["SPOTHEAL_NOTICE_FILE"])
asked = []


def write(path, text):
    """By rename, and on the disk before it counts."""
    part = path.with_suffix(".part")
    with part.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def report(step):
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    saved = {"step": step, "path": "step.txt", "time": now} if step else None
    write(PROGRESS, json.dumps({"step": step, "saved": saved}))


signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
checkpoint = FOLDER / "step.txt"
step = int(checkpoint.read_text()) if checkpoint.exists() else 0
print(f"attempt {os.environ['SPOTHEAL_ATTEMPT']} begins at step {step}", flush=True)
with (FOLDER / "begins.txt").open("a") as begins:
    begins.write(f"{step}\n")
    begins.flush()
    os.fsync(begins.fileno())  # a power cut would leave zeros in its place
report(step)
while not FINISH.exists():
    if asked or NOTICE.exists():
        print(f"stops at step {step}", flush=True)
        sys.exit(75)
    time.sleep(SECONDS)
    step += 1
    write(checkpoint, str(step))
    report(step)
pathlib.Path(os.environ["SPOTHEAL_RESULTS_DIR"], "sum.txt").write_text(str(step))
print(f"done at step {step}", flush=True)
