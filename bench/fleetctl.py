"""How long fleetctl keeps a person waiting: `python bench/fleetctl.py [--output json] [--peer "aws --version"]…`.

  help    `fleetctl --help`, the program that is installed beside this Python, from nothing: 150 ms
  status  `fleetctl status`, against the rehearsal's AWS over HTTP with 1,000 jobs and 5,000 volumes: 2 s, and as many
          calls as in an account that has this one job alone; `status --all` likewise

The best of several is held against the target, for what else the machine does only adds to it; the median is shown, and
the processor time, which tells a slow program from a busy machine.
A peer is any command, timed the same way. Exit 1 where a figure is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / ".ci/import_path")]

from moto.s3.models import s3_backends  # noqa: E402 - what they are is found by the path above

from spotheal.agent.protocol.clock import SystemClock, rfc3339  # noqa: E402
from spotheal.agent.protocol.names import default_bucket, new_run_id  # noqa: E402
from spotheal.fleet.rehearsal.ec2.rulebook import Rulebook  # noqa: E402
from spotheal.fleet.rehearsal.scenarios.api import Endpoint  # noqa: E402
from spotheal.fleet.rehearsal.scenarios.serve import environment  # noqa: E402

REGION, ACCOUNT = "us-west-2", "123456789012"
BUCKET = default_bucket(ACCOUNT, REGION)
JOBS, VOLUMES = 1000, 5000
HELP_SECONDS_MAX, STATUS_SECONDS_MAX = 0.150, 2.0
LAUNCHES, EVENTS = 10, 200


@dataclass(frozen=True)
class Figure:
    name: str
    best: float  # seconds
    median: float
    processor: float  # seconds, the best
    target: float | None
    calls: int | None = None
    calls_alone: int | None = None

    @property
    def missed(self) -> bool:
        return (self.target is not None and self.best > self.target) or self.calls != self.calls_alone

    def to_document(self) -> dict[str, Any]:
        return {**vars(self), "missed": self.missed}


Times = list[tuple[float, float]]  # seconds by the wall, and of the processor


def timed(command: Sequence[str], times: int, more: dict[str, str] | None = None, at: str | None = None) -> Times:
    """RuntimeError where it fails."""
    found = []
    for _ in range(times):
        began, before = time.perf_counter(), _children()
        done = subprocess.run(command, capture_output=True, env={**os.environ, **(more or {})}, cwd=at)
        found.append((time.perf_counter() - began, _children() - before))
        if done.returncode != 0:
            raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr.decode()[-500:]}")
    return found


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def figure(name: str, times: Times, target: float | None, **more: Any) -> Figure:
    wall = [seconds for seconds, _ in times]
    return Figure(name, min(wall), statistics.median(wall), min(used for _, used in times), target, **more)


# ---------------------------------------------------------------------------------------------------------- the account
class Account:
    """One job at work, and as many others as are asked for."""

    def __init__(self, rules: Rulebook, endpoint: Endpoint) -> None:
        self.rules, self.endpoint = rules, endpoint
        self._s3 = s3_backends[ACCOUNT]["aws"]
        self._s3.create_bucket(BUCKET, REGION)
        self._now = SystemClock().now()
        self._job("cifar", volumes=3, at_work=True)

    def _put(self, key: str, body: object) -> None:
        text = body if isinstance(body, str) else json.dumps(body)
        self._s3.put_object(BUCKET, key, text.encode())

    def _job(self, job: str, volumes: int, *, at_work: bool = False) -> None:
        run = new_run_id(self._now)
        status = {
            "schema_version": 1, "phase": "training" if at_work else "done", "reason": "", "instance": "i-0a",
            "heartbeat": rfc3339(self._now), "term": 3, "progress": {"step": 120, "steps_total": 400},
        }  # fmt: skip
        self._put(f"{job}/{run}/status.json", status)
        self._put(f"{job}/{run}/fleet.json", {"fleet_id": None, "requested_at": rfc3339(self._now)})
        if at_work:
            for number in range(LAUNCHES):
                launch = {"instance": f"i-{number:017x}", "time": rfc3339(self._now), "outcome": "interrupted"}
                self._put(f"{job}/{run}/launches/i-{number:017x}.json", launch)
            events = [{"time": rfc3339(self._now), "event": "notice", "id": str(number), "instance": "i-0a"}
                      for number in range(EVENTS)]  # fmt: skip
            self._put(f"{job}/{run}/ledger.jsonl", "".join(json.dumps(event) + "\n" for event in events))
        tags = [{"Key": f"spotheal:{key}", "Value": value} for key, value in {"job": job, "run": run}.items()]
        for _ in range(volumes):
            given = {"AvailabilityZone": f"{REGION}a", "Size": 1, "VolumeType": "gp3",
                     "TagSpecifications": [{"ResourceType": "volume", "Tags": tags}]}  # fmt: skip
            self.rules.call("CreateVolume", given)

    def fill(self) -> None:
        for number in range(JOBS - 1):
            self._job(f"job-{number}", volumes=VOLUMES // JOBS)

    def calls(self) -> int:
        return len(self.rules.calls) + len(self.endpoint.forwarded)


@contextmanager
def account() -> Iterator[Account]:
    rules = Rulebook(SystemClock(), REGION, (f"{REGION}a", f"{REGION}b"), ACCOUNT)
    with Endpoint(rules) as endpoint:
        yield Account(rules, endpoint)


def status_figures(program: str, times: int) -> list[Figure]:
    commands = {"status": [program, "status", "cifar"], "status --all": [program, "status", "--all"]}
    found = []
    with account() as full, tempfile.TemporaryDirectory() as folder:
        more = environment(full.endpoint, REGION)
        alone = {}
        for name, command in commands.items():
            before = full.calls()
            timed(command, 1, more, folder)
            alone[name] = full.calls() - before
        full.fill()
        for name, command in commands.items():
            before = full.calls()
            seconds = timed(command, times, more, folder)
            calls = (full.calls() - before) // times
            # All jobs are looked into up to a screenful, so an account of one job has fewer to look into.
            expected = alone[name] if name == "status" else calls if calls < SCREENFUL_CALLS_MAX else alone[name]
            found.append(figure(name, seconds, STATUS_SECONDS_MAX, calls=calls, calls_alone=expected))
    return found


SCREENFUL_CALLS_MAX = 60  # 25 jobs, two calls each, and those for the list


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", choices=["table", "json"], default="table")
    parser.add_argument("--times", type=int, default=15)
    parser.add_argument("--peer", action="append", default=[], metavar="COMMAND", help="timed the same way; no target")
    options = parser.parse_args()
    program = str(Path(sys.executable).parent / "fleetctl")
    figures = [figure("help", timed([program, "--help"], options.times), HELP_SECONDS_MAX)]
    figures += status_figures(program, max(3, options.times // 3))
    figures += [figure(peer, timed(shlex.split(peer), max(3, options.times // 3)), None) for peer in options.peer]
    missed = [one for one in figures if one.missed]
    if options.output == "json":
        print(json.dumps({"schema_version": 1, "jobs": JOBS, "volumes": VOLUMES, "missed": [one.name for one in missed],
                          "figures": [one.to_document() for one in figures]}, indent=1))  # fmt: skip
    else:
        for one in figures:
            target = f"target {1000 * one.target:.0f} ms" if one.target else "no target"
            calls = f", {one.calls} calls (alone {one.calls_alone})" if one.calls is not None else ""
            said = "  MISSED" if one.missed else ""
            median, used = f"median {1000 * one.median:.0f} ms", f"processor {1000 * one.processor:.0f} ms"
            print(f"{one.name:<24} {1000 * one.best:6.0f} ms, {median}, {used}, {target}{calls}{said}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
