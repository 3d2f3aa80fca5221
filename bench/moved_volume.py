"""From the mount to the trainer's first line: a moved volume beside a fresh clone. `python bench/moved_volume.py
[--output json]`; root, Linux. Exit 1 if the moved volume takes longer (the median of `ROUNDS`).

The volume has a repository of 3,000 modules as its working copy, an environment of `setup` with 300 files, and a
checkpoint of 256 MiB. The first read of a block takes 10 ms, 64 at once (`lazy_device`). A trainer imports 3,000 or 300
of the modules, then prints its first line:
  moved   mount, read-ahead, the working copy as the agent finds it, its looks at saved files, the trainer
  fresh   the same looks and trainer in a clone on the machine's own disk, whose fetch was over before the mount
  plain   moved, without the read-ahead
The first trainer of a volume leaves byte code there, as Python does unless PYTHONDONTWRITEBYTECODE is set; a fresh
clone has none. The rows with `byte_code=False` have that variable set. They are for information: they decide no result.
On 2 processors that others use too (2026-11-23, load 2 to 6), medians in seconds. Blocks were not yet read first:
  3,000 imported  moved 3.6, fresh 7.4 (ratio 0.48), plain 37; without byte code moved 8.5, fresh 8.4 (ratio 1.01)
    300 imported  moved 0.5, fresh 0.7 (ratio 0.74), plain 5.4; without byte code moved 2.3, fresh 0.7 (ratio 3.15)
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in (".ci/import_path", "bench")]

import structlog  # noqa: E402 - found by the path above
from lazy_device import lazy_device  # noqa: E402

from spotheal.agent.files.folders import Folders  # noqa: E402
from spotheal.agent.processes.foreign_command import Surroundings  # noqa: E402
from spotheal.agent.protocol.clock import SystemClock, never  # noqa: E402
from spotheal.agent.protocol.instance_config import InstanceConfig  # noqa: E402
from spotheal.agent.protocol.job import parse_job  # noqa: E402
from spotheal.agent.protocol.names import StoreUrl  # noqa: E402
from spotheal.agent.repository.working_copy import Fetched, files_of, is_on_volume, make_working_copy  # noqa: E402
from spotheal.agent.trainer.saved_files import SavedFiles  # noqa: E402
from spotheal.agent.trainer.written_files import WrittenFiles  # noqa: E402
from spotheal.agent.volume import extents  # noqa: E402
from spotheal.agent.volume.warmup import Warmup  # noqa: E402

MODULES, PACKAGES, LINES = 3000, 30, 150
ENVIRONMENT_FILES = 300
READ_SECONDS = 0.010
CHECKPOINT_MIB = 256
ROUNDS = 3
RATIO_MAX = 1.0
_JOB = {"job": {"name": "j", "repository": "https://h/r", "command": ["python", "train.py"]}}
CONFIG = InstanceConfig(parse_job(_JOB), "run", "us-west-2", StoreUrl("bucket", "j/run"), "1" * 40)
WHERE = Surroundings(None, SystemClock(), never())
LOG = structlog.get_logger()


def write_repository(folder: Path) -> None:
    for number in range(MODULES):
        package = folder / f"package{number % PACKAGES}"
        package.mkdir(parents=True, exist_ok=True)
        functions = "\n\n".join(
            f"def function_{line}(a, b=({line}, 'text {number}')):\n    return [a + {line}, b, {{'key': a * {line}}}]"
            for line in range(LINES // 3)
        )
        (package / f"module{number}.py").write_text(f'"""Module {number}."""\n\n{functions}\n')
    for package in folder.iterdir():
        (package / "__init__.py").touch()
    (folder / "train.py").write_text(
        "import importlib, sys\n"
        f"for number in range(int(sys.argv[1])):\n"
        f"    importlib.import_module(f'package{{number % {PACKAGES}}}.module{{number}}')\n"
        "print('first line', flush=True)\n"
    )


def first_line(code: Path, imported: int, *, byte_code: bool) -> None:
    """The shell that starts this bench must not decide whether Python writes byte code."""
    argv = [sys.executable, "-S", *([] if byte_code else ["-B"]), "train.py", str(imported)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run(argv, cwd=code, check=True, stdout=subprocess.DEVNULL, env=environment)


def fill(image: Path, repository: Path, mount: Path, imported: int, *, byte_code: bool) -> None:
    """As an earlier machine left the volume."""
    image.unlink(missing_ok=True)
    with image.open("wb") as file:
        file.truncate(1 << 30)
    run("mkfs.xfs", "-q", str(image))
    try:
        run("mount", "-o", "loop", str(image), str(mount))
        folders = laid_out(mount)
        folders.make(None)
        fetched = Fetched(repository, files_of(repository))
        make_working_copy(CONFIG, folders, WHERE, Path(sys.executable), LOG, fetched=fetched)
        first_line(folders.clone, imported, byte_code=byte_code)
        environment = folders.environments / "env-1" / "lib"
        environment.mkdir(parents=True)
        for number in range(ENVIRONMENT_FILES):
            (environment / f"library{number}.py").write_bytes(os.urandom(1 << 13))
        (folders.checkpoints / "step-1").write_bytes(os.urandom(1 << 20) * CHECKPOINT_MIB)
        os.sync()
        extents.record(folders, never())
    finally:
        unmount("", mount)


def look(folders: Folders) -> None:
    """What the agent looks at between the code and the trainer's start, in this order."""
    SavedFiles(folders).mark()
    WrittenFiles(folders, folders.home, CONFIG.run, "i-1", never()).predecessor()


def laid_out(mount: Path) -> Folders:
    return Folders.at(mount.parent, f"/{mount.name}")


def moved(image: Path, mount: Path, imported: int, *, byte_code: bool, ahead: bool) -> float:
    with lazy_device(image, READ_SECONDS) as device:
        warmup = Warmup(LOG)
        try:
            run("mount", device, str(mount))
            began = time.monotonic()
            folders = laid_out(mount)
            if ahead:
                warmup.moved_volume(folders, device)
            assert is_on_volume(CONFIG, folders)
            folders.make(None)
            make_working_copy(CONFIG, folders, WHERE, Path(sys.executable), LOG, fetched=None)
            look(folders)
            first_line(folders.clone, imported, byte_code=byte_code)
            return time.monotonic() - began
        finally:
            warmup.end()
            unmount(device, mount)


def fresh(repository: Path, folder: Path, imported: int, *, byte_code: bool) -> float:
    shutil.rmtree(folder, ignore_errors=True)
    folders = Folders.at(folder, "/volume")
    folders.make(None)
    shutil.copytree(repository, folders.clone)
    began = time.monotonic()
    look(folders)
    first_line(folders.clone, imported, byte_code=byte_code)
    return time.monotonic() - began


def unmount(device: str, mount: Path) -> None:
    """A process that began meanwhile in a mount namespace of its own holds the file system for a moment longer."""
    if not mount.is_mount():
        return
    run("umount", str(mount))
    until = time.monotonic() + 60
    while device and Path("/sys/fs/xfs", Path(device).name).exists() and time.monotonic() < until:
        time.sleep(0.05)


def run(*argv: str) -> None:
    subprocess.run(argv, check=True)


def measure(folder: Path, imported: int, *, byte_code: bool) -> dict[str, Any]:
    repository, image, mount = folder / "repository", folder / "image", folder / "volume"
    mount.mkdir(exist_ok=True)
    shutil.rmtree(repository, ignore_errors=True)
    write_repository(repository)
    fill(image, repository, mount, imported, byte_code=byte_code)
    seconds: dict[str, list[float]] = {"moved": [], "fresh": [], "plain": []}
    for number in range(ROUNDS):
        seconds["fresh"].append(fresh(repository, folder / "clone", imported, byte_code=byte_code))
        seconds["moved"].append(moved(image, mount, imported, byte_code=byte_code, ahead=True))
        if number == 0 and byte_code:
            seconds["plain"].append(moved(image, mount, imported, byte_code=byte_code, ahead=False))
    ratio = statistics.median(seconds["moved"]) / statistics.median(seconds["fresh"])
    rounded = {name: [round(each, 2) for each in measured] for name, measured in seconds.items()}
    return {
        "imported": imported, "byte_code": byte_code, **rounded,
        "ratio": round(ratio, 2), "ratio_max": RATIO_MAX if byte_code else None,
    }  # fmt: skip


def end_on_signals() -> None:
    """As an exit of Python, so that the mount, the device and the folder are removed."""

    def end(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)  # a second Ctrl-C must not stop the removal
        sys.exit(128 + number)

    for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(each, end)


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--output", choices=("text", "json"), default="text")
    wanted = asked.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        print("this needs root, /dev/fuse and loop devices", file=sys.stderr)
        return 2
    end_on_signals()
    cases = [(imported, byte_code) for byte_code in (True, False) for imported in (MODULES, MODULES // 10)]
    with tempfile.TemporaryDirectory(prefix="spotheal-bench-") as folder:
        results = [measure(Path(folder), imported, byte_code=byte_code) for imported, byte_code in cases]
    if wanted.output == "json":
        print(json.dumps(results))
    else:
        for result in results:
            print(" ".join(f"{name}={value}" for name, value in result.items()))
    return 0 if all(each["ratio"] <= RATIO_MAX for each in results if each["byte_code"]) else 1


if __name__ == "__main__":
    sys.exit(main())
