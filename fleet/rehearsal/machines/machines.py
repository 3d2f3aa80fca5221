"""Instances of the rehearsal: each is a tree of real processes that runs its user data, with its own disks.

    <folder>/<instance>/user-data.sh, console.log     what it was launched with, what it printed
    <folder>/<instance>/root/                         SPOTHEAL_ROOT: all that the agent installs and writes
    <folder>/<instance>/dev/, devices.json            its disks; mounts.json is the stand-in programs' own
    <folder>/<instance>/bin/                          the stand-in programs, first on PATH

A machine's first process (programs/init.py) adopts every orphan and ends all when its pipe closes, so that terminating
a machine, ending the rehearsal and killing the rehearsal leave no process. Linux only.
"""

from __future__ import annotations

import gzip
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spotheal.agent.files.folders import Folders
from spotheal.agent.protocol.contract import NOTICE_FILE, write_atomically
from spotheal.fleet.rehearsal import programs
from spotheal.fleet.rehearsal.machines.volumes import GIB, Disk
from spotheal.fleet.rehearsal.programs.init import descendants

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ENDED_SECONDS_MAX = 10.0
# NVIDIA GPUs of instance types: MiB of each as nvidia-smi shows it, how many by size, and how many in any other size.
# docs.aws.amazon.com/ec2/latest/instancetypes/ac.html; whole GPUs only (g6f has fractions).
_GPUS: dict[str, tuple[int, dict[str, int], int]] = {
    "g4dn": (15360, {"12xlarge": 4, "metal": 8}, 1),
    "g5": (23028, {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8}, 1),
    "g6": (23034, {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8}, 1),
    "gr6": (23034, {}, 1),
    "g6e": (46068, {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8}, 1),
    "g7e": (97887, {"12xlarge": 2, "24xlarge": 4, "48xlarge": 8}, 1),
    "p2": (11441, {"8xlarge": 8, "16xlarge": 16}, 1),
    "p3": (16160, {"8xlarge": 4, "16xlarge": 8}, 1),
    "p3dn": (32510, {}, 8),
    "p4d": (40960, {}, 8),
    "p4de": (81920, {}, 8),
    "p5": (81559, {"4xlarge": 1}, 8),
    "p5e": (143771, {}, 8),
    "p5en": (143771, {}, 8),
}


def gpus_of(instance_type: str) -> dict[str, str]:
    """What makes the stand-in nvidia-smi show the GPUs of `instance_type`; {} for a type without any."""
    family, _, size = instance_type.partition(".")
    if family not in _GPUS:
        return {}
    mib, by_size, count = _GPUS[family]
    return {programs.GPUS: str(by_size.get(size, count)), programs.GPU_MIB: str(mib)}


@dataclass(frozen=True)
class Launch:
    """What an instance is started with. `environment` carries the endpoints."""

    instance: str
    zone: str
    instance_type: str
    user_data: bytes
    environment: dict[str, str] = field(default_factory=dict)


class Machine:
    """One instance. `on_end(self)` is called once, when its processes are gone, by whatever way."""

    def __init__(self, folder: Path, launch: Launch, on_end: Callable[[Machine], None] | None = None) -> None:
        self.launch = launch
        self.folder = folder
        self.root = folder / "root"
        self.started_at: float | None = None  # monotonic
        self.ended_at: float | None = None
        self._on_end = on_end
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ending = False
        self._disks: dict[str, Disk] = {}
        self._lay_out()

    # ----------------------------------------------------------------------------------------------------- processes
    def boot(self) -> None:
        """Run the user data (first boot only: a machine is never booted twice)."""
        with self._lock:
            if self._ending or self._process is not None:
                return
            self.started_at = time.monotonic()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(programs.FOLDER / "init.py"), str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=(self.folder / "init.log").open("wb"),
                cwd=self.root,
                env=self.environment(),
                start_new_session=True,
            )
        threading.Thread(target=self._await_end, name=f"end of {self.launch.instance}", daemon=True).start()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def powered_off(self) -> bool:
        """Whether it ended by itself (`systemctl poweroff` on it)."""
        return (self.folder / "powered-off").exists()

    def user_data_exit(self) -> int | None:
        """Exit code of the user data; None while it runs."""
        try:
            return int((self.folder / "user-data.exit").read_text())
        except (OSError, ValueError):
            return None

    def end(self) -> None:
        """Cut the power: every process is killed at once and none is left on return."""
        with self._lock:
            self._ending = True
            process = self._process
        if process is None:
            self._ended()
            return
        with suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        try:
            process.wait(_ENDED_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            _kill(process.pid)
        self._kill_marked()
        self._ended()

    def shut_down(self, seconds_max: float) -> None:
        """As an operating system does: SIGTERM to the agent; the power is cut when it ended, or after `seconds_max`."""
        process = self._process
        if process is None:
            self.end()
            return
        with suppress(OSError):
            assert process.stdin is not None
            process.stdin.write(b"stop\n")
            process.stdin.flush()
        limit = time.monotonic() + seconds_max
        while time.monotonic() < limit and self.running and descendants(process.pid):
            time.sleep(0.1)
        self.end()

    @contextmanager
    def still(self) -> Iterator[None]:
        """Hold every process for a moment (what a snapshot of a running machine's volume sees is one moment)."""
        process = self._process
        held: list[int] = []
        if process is not None and self.running:
            while new := [pid for pid in descendants(process.pid) if pid not in held]:
                held += new
                _signal(new, signal.SIGSTOP)
        try:
            yield
        finally:
            _signal(held, signal.SIGCONT)

    def _await_end(self) -> None:
        process = self._process
        assert process is not None
        process.wait()
        self._kill_marked()
        self._ended()

    def _ended(self) -> None:
        with self._lock:
            if self.ended_at is not None:
                return
            self.ended_at = time.monotonic()
        if self._on_end is not None:
            self._on_end(self)

    def _kill_marked(self) -> None:
        """Where the first process itself was killed, its children are found by their environment.

        By the folder, not by the instance's id: two rehearsals with one seed have machines of the same ids.
        """
        notice_file = Folders.at(self.root, "/").notice_file  # a trainer gets nothing else that names this machine
        markers = {f"{programs.INSTANCE_DIR}={self.folder}".encode(), f"{NOTICE_FILE}={notice_file}".encode()}
        limit = time.monotonic() + _ENDED_SECONDS_MAX
        while time.monotonic() < limit:
            marked = [pid for pid in _pids() if markers & set(_environ(pid))]
            if not marked:
                return
            _signal(marked, signal.SIGKILL)
            time.sleep(0.02)

    def environment(self) -> dict[str, str]:
        python = str(Path(getattr(sys, "_base_executable", sys.executable)).parent)
        return {
            "PATH": f"{self.folder / 'bin'}:{python}:{_SYSTEM_PATH}",
            "HOME": str(self.root / "root"),
            "LANG": "C.UTF-8",
            "SPOTHEAL_ROOT": str(self.root),
            programs.INSTANCE_DIR: str(self.folder),
            **self.launch.environment,
        }

    # --------------------------------------------------------------------------------------------------------- disks
    def attach(self, disk: Disk) -> str:
        """The device node appears; returns its path. Attached twice is attached."""
        with self._lock:
            self._disks.setdefault(disk.volume, disk)
            self._write_devices()
            return next(str(row["path"]) for row in self._rows() if row["volume"] == disk.volume)

    def detach(self, volume: str) -> None:
        with self._lock:
            self._disks.pop(volume, None)
            self._write_devices()

    def has_mounted(self, volume: str) -> bool:
        try:
            table = json.loads((self.folder / "mounts.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return any(entry["volume"] == volume for entry in table)

    def _rows(self) -> list[dict[str, Any]]:
        """As on a GPU instance: the root disk, a blank instance-store disk that is not ours, then what was attached."""
        own_disks = self.folder / "own-disks"
        root = Disk("vol-00000000000000001", own_disks / "root", own_disks / "nothing")
        store = Disk("", own_disks / "store", own_disks / "nothing")
        rows = [
            self._row(0, root, "vol00000000000000001", root=True),
            self._row(1, store, "AWS00000000000000001", model="Amazon EC2 NVMe Instance Storage"),
        ]
        return rows + [
            self._row(number, disk, disk.volume.replace("-", "")) for number, disk in enumerate(self._disks.values(), 2)
        ]

    def _row(
        self, number: int, disk: Disk, serial: str, *, root: bool = False, model: str = "Amazon Elastic Block Store"
    ) -> dict[str, Any]:
        path = self.folder / "dev" / f"nvme{number}n1"
        row = {"path": str(path), "serial": serial, "volume": disk.volume, "size_bytes": disk.size_bytes}
        return row | {"model": model, "root": root, "image": os.path.realpath(disk.image), "files": str(disk.files)}

    def _write_devices(self) -> None:
        rows = self._rows()
        nodes = {Path(row["path"]): row["image"] for row in rows}
        for old in (self.folder / "dev").iterdir():
            if os.path.realpath(old) != nodes.get(old):
                old.unlink()
        for path, image in nodes.items():
            if not path.is_symlink():
                path.symlink_to(image)
        write_atomically(self.folder / "devices.json", json.dumps({"devices": rows}, indent=1))

    # ------------------------------------------------------------------------------------------------------- folders
    def _lay_out(self) -> None:
        for name in ("root/root", "root/tmp", "dev", "bin", "own-disks"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        # Whoever owns the operator's repository, its rehearsal may clone it.
        (self.folder / "root/root/.gitconfig").write_text("[safe]\n\tdirectory = *\n")
        for name, size_gib in (("root", 8), ("store", 1)):
            (self.folder / "own-disks" / name).touch()
            os.truncate(self.folder / "own-disks" / name, size_gib * GIB)
        for name in programs.NAMES:
            stand_in = shlex.join([sys.executable, "-I", "-S", str(programs.FOLDER / "stand_in.py"), name])
            _write_program(self.folder / "bin" / name, f'#!/bin/sh\nexec {stand_in} "$@"\n'.encode())
        (self.folder / "console.log").touch()
        data = self.launch.user_data
        _write_program(self.folder / "user-data.sh", gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        self._write_devices()


class Machines:
    """All machines of the rehearsal, by instance id. `boot_seconds` stands for the 90 s of a real boot.

    `make` makes one; tests boot real operating systems with it.
    """

    def __init__(
        self,
        folder: Path,
        boot_seconds: float,
        on_end: Callable[[Machine], None] | None = None,
        make: Callable[[Path, Launch, Callable[[Machine], None] | None], Machine] = Machine,
    ) -> None:
        self._folder, self._boot_seconds, self._on_end, self._make = folder, boot_seconds, on_end, make
        self._machines: dict[str, Machine] = {}
        self._timers: list[threading.Timer] = []
        self._lock = threading.Lock()
        self._closed = False

    def launch(self, launch: Launch) -> Machine:
        """A machine that runs its user data after the time a boot takes; returns at once."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the rehearsal has ended")
            machine = self._make(self._folder / launch.instance, launch, self._on_end)
            self._machines[launch.instance] = machine
            timer = threading.Timer(self._boot_seconds, machine.boot)
            timer.daemon = True
            self._timers.append(timer)
        timer.start()
        return machine

    def get(self, instance: str) -> Machine | None:
        return self._machines.get(instance)

    def all(self) -> list[Machine]:
        """In the order of their launch."""
        return list(self._machines.values())

    def close(self) -> None:
        """End every machine; nothing can be launched afterwards."""
        with self._lock:
            self._closed = True
            timers, machines = list(self._timers), list(self._machines.values())
        for timer in timers:
            timer.cancel()
        for machine in machines:
            machine.end()


def _write_program(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o755)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)


def _kill(first: int) -> None:
    """The first process and all below it, from outside."""
    _signal([*descendants(first), first], signal.SIGKILL)
