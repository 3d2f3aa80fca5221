"""From the mount to the trainer's first line: a moved volume beside a fresh clone. `python bench/moved_volume.py
[--output json]`; root, Linux. Exit 1 if the moved volume takes longer (the median of `ROUNDS`).

The volume has a repository of 3,000 modules as its working copy, an environment of `setup` with 300 files, and a
checkpoint of 256 MiB. Each read of the device
takes 10 ms, 64 at once (`lazy_device`). A trainer imports 3,000 or 300 of the modules, then prints its first line:
  moved   mount, reading ahead, the working copy as the agent finds it, its looks at saved files, the trainer
  fresh   the same looks and trainer in a clone on the machine's own disk, whose fetch was over before the mount
  plain   moved, without the read-ahead
Not measured on a quiet machine yet. On one with 2 processors and 12 programs that wanted them (2026-11-22), medians:
    300 imported  moved 3.8 s, fresh 1.9 s (ratio 1.98, a miss); plain 8.0 s
  3,000 imported  moved 31.1 s, fresh 27.3 s (one run each)
Of a moved start with 300 (one run each), the agent's two looks took 0.8 s before the read-ahead began with the status
of the commit's files, and 0.4 s since. The trainer itself took 0.6 s of processor time, and 2.3 s on the clock.
The device's own process, the reader and the trainer share these processors.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in (".ci/import_path", "bench")]

import structlog  # noqa: E402 - found by the path above
from lazy_device import lazy_device  # noqa: E402

from spotheal.agent.clock import SystemClock, never  # noqa: E402
from spotheal.agent.config import parse_job  # noqa: E402
from spotheal.agent.folders import Folders  # noqa: E402
from spotheal.agent.foreign_command import Surroundings  # noqa: E402
from spotheal.agent.instance_config import InstanceConfig  # noqa: E402
from spotheal.agent.names import StoreUrl  # noqa: E402
from spotheal.agent.saved_files import SavedFiles  # noqa: E402
from spotheal.agent.warmup import Warmup  # noqa: E402
from spotheal.agent.working_copy import Fetched, files_of, is_on_volume, make_working_copy  # noqa: E402
from spotheal.agent.written_files import WrittenFiles  # noqa: E402

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


def first_line(code: Path, imported: int) -> None:
    argv = [sys.executable, "-S", "train.py", str(imported)]
    subprocess.run(argv, cwd=code, check=True, stdout=subprocess.DEVNULL)


def fill(image: Path, repository: Path, mount: Path, imported: int) -> None:
    """As an earlier machine left the volume."""
    image.unlink(missing_ok=True)
    with image.open("wb") as file:
        file.truncate(1 << 30)
    run("mkfs.xfs", "-q", str(image))
    run("mount", "-o", "loop", str(image), str(mount))
    try:
        folders = laid_out(mount)
        folders.make(None)
        fetched = Fetched(repository, files_of(repository))
        make_working_copy(CONFIG, folders, WHERE, Path(sys.executable), LOG, fetched=fetched)
        first_line(folders.clone, imported)
        environment = folders.environments / "env-1" / "lib"
        environment.mkdir(parents=True)
        for number in range(ENVIRONMENT_FILES):
            (environment / f"library{number}.py").write_bytes(os.urandom(1 << 13))
        (folders.checkpoints / "step-1").write_bytes(os.urandom(1 << 20) * CHECKPOINT_MIB)
    finally:
        run("umount", str(mount))


def look(folders: Folders) -> None:
    """What the agent looks at between the code and the trainer's start, in this order."""
    SavedFiles(folders).mark()
    WrittenFiles(folders, folders.home, CONFIG.run, "i-1", never()).predecessor()


def laid_out(mount: Path) -> Folders:
    return Folders.at(mount.parent, f"/{mount.name}")


def moved(image: Path, mount: Path, imported: int, *, ahead: bool) -> float:
    with lazy_device(image, READ_SECONDS) as device:
        run("mount", device, str(mount))
        warmup = Warmup(LOG)
        try:
            began = time.monotonic()
            folders = laid_out(mount)
            if ahead:
                warmup.moved_volume(folders)
            assert is_on_volume(CONFIG, folders)
            folders.make(None)
            make_working_copy(CONFIG, folders, WHERE, Path(sys.executable), LOG, fetched=None)
            look(folders)
            first_line(folders.clone, imported)
            return time.monotonic() - began
        finally:
            warmup.end()
            unmount(device, mount)


def fresh(repository: Path, folder: Path, imported: int) -> float:
    shutil.rmtree(folder, ignore_errors=True)
    folders = Folders.at(folder, "/volume")
    folders.make(None)
    shutil.copytree(repository, folders.clone)
    began = time.monotonic()
    look(folders)
    first_line(folders.clone, imported)
    return time.monotonic() - began


def unmount(device: str, mount: Path) -> None:
    """A process that began meanwhile in a mount namespace of its own holds the file system for a moment longer."""
    run("umount", str(mount))
    until = time.monotonic() + 60
    while Path("/sys/fs/xfs", Path(device).name).exists() and time.monotonic() < until:
        time.sleep(0.05)


def run(*argv: str) -> None:
    subprocess.run(argv, check=True)


def measure(folder: Path, imported: int) -> dict[str, Any]:
    repository, image, mount = folder / "repository", folder / "image", folder / "volume"
    mount.mkdir(exist_ok=True)
    shutil.rmtree(repository, ignore_errors=True)
    write_repository(repository)
    fill(image, repository, mount, imported)
    seconds: dict[str, list[float]] = {"moved": [], "fresh": [], "plain": []}
    for number in range(ROUNDS):
        seconds["fresh"].append(fresh(repository, folder / "clone", imported))
        seconds["moved"].append(moved(image, mount, imported, ahead=True))
        if number == 0:
            seconds["plain"].append(moved(image, mount, imported, ahead=False))
    ratio = statistics.median(seconds["moved"]) / statistics.median(seconds["fresh"])
    rounded = {name: [round(one, 2) for one in found] for name, found in seconds.items()}
    return {"imported": imported, **rounded, "ratio": round(ratio, 2), "ratio_max": RATIO_MAX}


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--output", choices=("text", "json"), default="text")
    wanted = asked.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        print("this needs root, /dev/fuse and loop devices", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="spotheal-bench-") as folder:
        found = [measure(Path(folder), imported) for imported in (MODULES, MODULES // 10)]
    if wanted.output == "json":
        print(json.dumps(found))
    else:
        for one in found:
            print(" ".join(f"{name}={value}" for name, value in one.items()))
    return 0 if all(one["ratio"] <= RATIO_MAX for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
