"""How fast a trainer's output passes the redaction, with eight secrets known, in processor time.

`python bench/redaction.py [--output json]`: MB/s of clean lines in batches as the pump hands them on, of lines one by
one, and of lines that all hold a secret. Exit 1 where the first is below the target: a trainer that prints a megabyte a
second must cost the agent less than a tenth of a core.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

from spotheal.agent.protocol.redaction import Redaction

TARGET_MB_S = 10.0
BATCH = 200
LINE = "2026-11-21 08:00:00 epoch 3 step {n}/48000 loss 0.5231 accuracy 0.8712 lr 3e-4 samples/s 2310.5 https://h/x"


def mb_per_second(work: Callable[[], int], seconds: float = 2.0) -> float:
    began, done = time.process_time(), 0
    while time.process_time() - began < seconds:
        done += work()
    return done / (time.process_time() - began) / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", choices=("text", "json"), default="text")
    given = parser.parse_args()
    secrets = Redaction()
    secrets.learn([f"a-secret-value-{number}-with-some-length" for number in range(8)])
    stream = secrets.stream()
    clean = [LINE.format(n=number) for number in range(BATCH)]
    leaky = [f"{line} a-secret-value-{number % 8}-with-some-length" for number, line in enumerate(clean)]

    def batched(lines: list[str]) -> Callable[[], int]:
        size = sum(map(len, lines))
        return lambda: len(stream.lines(lines)) and size

    figures = {
        "clean_batches_mb_s": mb_per_second(batched(clean)),
        "clean_lines_mb_s": mb_per_second(lambda: sum(len(stream.line(line)) for line in clean)),
        "leaky_batches_mb_s": mb_per_second(batched(leaky)),
    }
    document = {"schema_version": 1, "target_mb_s": TARGET_MB_S, **{name: round(x, 1) for name, x in figures.items()}}
    if given.output == "json":
        print(json.dumps(document))
    else:
        for name, value in document.items():
            print(f"{name:24} {value}")
    return int(figures["clean_batches_mb_s"] < TARGET_MB_S)


if __name__ == "__main__":
    sys.exit(main())
