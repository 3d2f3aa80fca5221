"""`make pythons`: each Python of an operator with each Python of an instance, in the local cloud.

Each Python from 3.10 on that this machine has gets a light environment with fleetctl from our wheel, as a user installs
it (~/.cache/spotheal/pythons; the first time pip fetches boto3 and a few more, no torch). Then `fleetctl request` of
each boots machines whose `python3` is each in turn, until the agent has said which instance it is. Exit 1 if a pair
does not boot.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "harness"))
import booted_cloud
from pythons_here import pythons

from spotheal.fleet.rehearsal.machines.machines import Launch, Machine
from spotheal.fleet.rehearsal.scenarios.scenario import Kill

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS_MAX = 180.0


class MachineWithPython(Machine):
    """Its `python3` is `python`."""

    def __init__(self, folder: Path, launch: Launch, on_end: Callable[[Machine], None] | None, python: str) -> None:
        super().__init__(folder, launch, on_end)
        base = subprocess.run(
            [python, "-I", "-c", "import os, sys; print(os.path.realpath(sys._base_executable))"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
        (self.folder / "bin/python3").unlink(missing_ok=True)
        (self.folder / "bin/python3").symlink_to(base)


def environment(version: str, python: str, wheel: Path) -> Path:
    """The virtual environment of an operator with this Python; made again where our wheel is another."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spotheal/pythons"
    mark, folder = hashlib.sha256(wheel.read_bytes()).hexdigest(), cache / version
    if not (folder / "bin/python").exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    if not (folder / "wheel").exists() or (folder / "wheel").read_text() != mark:
        pip = [str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        subprocess.run([*pip, str(wheel)], check=True)
        subprocess.run([*pip, "--force-reinstall", "--no-deps", str(wheel)], check=True)
        (folder / "wheel").write_text(mark)
    return folder


def boots_of(fleetctl: Path, instances: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Each version of `instances` and what is wrong with its boot, "" for nothing: one run that this fleetctl requests,
    whose machines are killed once they have booted, and each of which has the next Python."""
    booted_cloud.FLEETCTL = fleetctl
    waiting = iter(instances.values())

    def make(folder: Path, launch: Launch, on_end: Callable[[Machine], None] | None) -> Machine:
        return MachineWithPython(folder, launch, on_end, next(waiting, sys.executable))

    with (
        tempfile.TemporaryDirectory() as folder,
        booted_cloud.booted_cloud(Path(folder, "cloud"), lambda cloud: make, 1.0) as cloud,
    ):
        booted_cloud.request(cloud, Path(folder, "job"), 1.0, "xfs")
        for number, version in enumerate(instances):
            found = booted_cloud.until("an instance", lambda n=number: cloud.machines.all()[n:], SECONDS_MAX)  # type: ignore[misc]
            yield version, fault_of_boot(found[0], version)
            cloud.make(Kill(), found[0].launch.instance)


def fault_of_boot(machine: Machine, version: str) -> str:
    log, console = machine.root / "var/log/spotheal/agent.log", machine.folder / "console.log"
    limit = time.monotonic() + SECONDS_MAX
    while not (log.exists() and "this instance" in log.read_text()):
        if time.monotonic() > limit or machine.user_data_exit() not in (0, None):
            said = console.read_text().splitlines() if console.exists() else []
            return said[-1] if said else "no word on the console"
        time.sleep(0.1)
    installed = machine.root / f"opt/spotheal/agent/lib/python{version}"
    return "" if installed.is_dir() else f"the agent runs with another Python than {version}"


def main() -> int:
    found = pythons()
    print("found: " + ", ".join(f"Python {version} ({place})" for version, place in found.items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        wheels = ["-m", "pip", "--disable-pip-version-check", "--quiet", "wheel", "--no-deps", "--wheel-dir", folder]
        subprocess.run([sys.executable, *wheels, str(ROOT)], check=True)
        (wheel,) = Path(folder).glob("spotheal-*.whl")
        operators = {version: environment(version, place, wheel) for version, place in found.items()}
    faults = 0
    for operator, home in operators.items():
        for instance, fault in boots_of(home / "bin/fleetctl", found):
            faults += bool(fault)
            print(f"operator {operator}, instance {instance}: {fault or 'boots'}", flush=True)
    print(f"{len(found) ** 2 - faults} of {len(found) ** 2} pairs boot")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
