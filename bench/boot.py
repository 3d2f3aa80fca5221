"""How long a boot takes from the start of the user data to the agent running, with the wheelhouse at hand.

`python bench/boot.py [--boots 3] [--output json]`: seconds of the clock, and of processor time, of the quickest boot,
in the rehearsal's cloud (its instances are processes: no systemd, no network that is far). Exit 1 where the clock says
more than the target. The agent runs when it has said which instance it is. Linux; on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/boot"))
from booted_cloud import booted_cloud, request, until

from spotheal.fleet.rehearsal.machines.machines import Machine
from spotheal.fleet.rehearsal.programs.init import descendants
from spotheal.fleet.rehearsal.scenarios.scenario import Kill

TARGET_SECONDS = 5.0
BOOT_SECONDS_MAX = 300.0
_TICKS = os.sysconf("SC_CLK_TCK")


def processor_seconds(machine: Machine) -> float:
    """Of all processes of the machine, those that have ended included."""
    process = machine._process
    assert process is not None
    total = 0
    for pid in [process.pid, *descendants(process.pid)]:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15]))
        except OSError:
            continue
    return total / _TICKS


def agent_runs(machine: Machine) -> bool:
    log = machine.root / "var/log/spotheal/agent.log"
    return log.exists() and "this instance" in log.read_text()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--boots", type=int, default=3)
    parser.add_argument("--output", choices=("text", "json"), default="text")
    given = parser.parse_args()
    boots: list[dict[str, float]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        booted_cloud(Path(folder, "cloud"), lambda cloud: Machine, 1.0) as cloud,
    ):
        request(cloud, Path(folder, "job"), 1.0, "xfs")
        for number in range(given.boots):
            found = until("an instance", lambda n=number: cloud.machines.all()[n:], BOOT_SECONDS_MAX)  # type: ignore[misc]
            machine = found[0]
            until("its power", lambda m=machine: m.started_at, BOOT_SECONDS_MAX, 0.01)  # type: ignore[misc]
            until("the agent runs", lambda m=machine: agent_runs(m), BOOT_SECONDS_MAX, 0.01)  # type: ignore[misc]
            assert machine.started_at is not None
            clock = time.monotonic() - machine.started_at
            boots.append({"seconds": round(clock, 2), "processor_seconds": round(processor_seconds(machine), 2)})
            cloud.make(Kill(), machine.launch.instance)
    quickest = min(boots, key=lambda boot: boot["seconds"])
    document = {"schema_version": 1, "target_seconds": TARGET_SECONDS, **quickest, "load": os.getloadavg()[0]}
    if given.output == "json":
        print(json.dumps({**document, "boots": boots}))
    else:
        for name, value in document.items():
            print(f"{name:20} {value}")
    return int(quickest["seconds"] > TARGET_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
