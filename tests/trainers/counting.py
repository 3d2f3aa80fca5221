"""Keeps the contract: counts steps, reports and saves each, stops at SIGTERM with 75, resumes."""

import json
import os
import pathlib
import signal
import sys
import time

steps, seconds = int(sys.argv[1]), float(sys.argv[2])
crash_at = int(sys.argv[3]) if len(sys.argv) > 3 else -1  # exits with 3 before this step is done
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
checkpoint = pathlib.Path(os.environ["SPOTHEAL_CHECKPOINT_DIR"], "step.txt")
progress = pathlib.Path(os.environ["SPOTHEAL_PROGRESS_FILE"])


def write(path, text):
    beside = path.with_suffix(".tmp")
    beside.write_text(text)
    os.replace(beside, path)


def report(step, saved):
    body = {
        "step": step,
        "steps_total": steps,
        "saved": {"step": saved, "path": "step.txt", "time": ""} if saved else None,
    }
    write(progress, json.dumps(body))


step = int(checkpoint.read_text()) if checkpoint.exists() else 0
report(step, step)
while step < steps:
    if stop:
        sys.exit(75)
    time.sleep(seconds)
    if step + 1 == crash_at:
        sys.exit(3)
    step += 1
    write(checkpoint, str(step))
    report(step, step)
