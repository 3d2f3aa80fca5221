"""A machine below a temporary folder on which a real supervisor runs one real trainer."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import structlog

from spotheal.agent.files.folders import Folders
from spotheal.agent.protocol.clock import Stop, SystemClock
from spotheal.agent.protocol.contract import Notice
from spotheal.agent.protocol.ends import TrainerEnd
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job import parse_job
from spotheal.agent.protocol.names import StoreUrl
from spotheal.agent.trainer.supervisor import Hooks, Supervisor, Timing

TRAINERS = Path(__file__).resolve().parents[1] / "trainers"
QUICK = Timing(poll_seconds=0.05, first_poll_seconds=0.02, unasked_wait_seconds=0.1, empty_checkpoints_seconds=600)


class HurriedClock(SystemClock):
    """Remembers what was to be slept, and sleeps at most a twentieth of a second of it."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def sleep(self, seconds: float, until: Stop | None = None) -> bool:
        self.slept.append(seconds)
        return super().sleep(min(seconds, 0.05), until)


class Bench:
    """A machine below a temporary folder, with one trainer on it."""

    def __init__(self, root: Path) -> None:
        self.folders = Folders.at(root, "/volume")
        self.folders.clone.mkdir(parents=True)
        self.clock = HurriedClock()
        self.lines: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.attempts: list[int] = []

    def supervisor(self, *command: str, job: dict[str, Any] | None = None, **more: Any) -> Supervisor:
        hooks = Hooks(
            on_line=self.lines.append,
            on_attempt=self.attempts.append,
            on_event=lambda name, **fields: self.events.append((name, fields)),
        )
        limits, environment = more.pop("limits", {}), more.pop("environment", {})
        document = {
            "job": {"name": "j", "repository": "/r", "command": list(command), **(job or {})},
            "limits": limits,
            "environment": environment,
        }
        config = InstanceConfig(parse_job(document), "run", "us-west-2", StoreUrl("bucket", "j/run"), "0" * 40)
        more = {"interpreter": Path(sys.executable), "hooks": hooks, "timing": QUICK, **more}
        return Supervisor(config, self.folders, self.clock, structlog.get_logger(), **more)

    def trainer(self, name: str, *arguments: str, **more: Any) -> Supervisor:
        return self.supervisor("python", str(TRAINERS / f"{name}.py"), *arguments, **more)

    def is_ready(self) -> bool:
        return (self.folders.results / "ready").exists()

    def named(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.events if name == event]

    def await_named(self, event: str, seconds: float = 20) -> None:
        """Until there is such an event; a test that misses it fails at what comes after."""
        until = time.monotonic() + seconds
        while not self.named(event) and time.monotonic() < until:
            time.sleep(0.01)

    def left(self) -> list[int]:
        """Processes that were started for this bench's trainer and still run."""
        marked = f"SPOTHEAL_NOTICE_FILE={self.folders.notice_file}".encode()
        return [pid for pid in _pids() if marked in _environ(pid)]


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def run_with(
    supervisor: Supervisor, when: Callable[[], bool], then: Callable[[], None], *, seconds: float = 20
) -> TrainerEnd:
    """Run the supervisor; do `then` once `when` holds. Raises what the supervisor raises."""
    pool = ThreadPoolExecutor(1)
    running = pool.submit(supervisor.run)
    pool.shutdown(wait=False)
    until = time.monotonic() + seconds
    while not when() and not running.done() and time.monotonic() < until:
        time.sleep(0.01)
    if not running.done() or running.exception() is None:
        then()
    return running.result(30)


def notice(clock: SystemClock, seconds: float) -> Notice:
    return Notice("terminate", clock.now() + timedelta(seconds=seconds))
