"""What the service manager is told, over a real socket, and when it is told nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotheal.agent.machine.systemd_notify import Notifier
from spotheal.agent.protocol.clock import SystemClock
from spotheal.agent.record.watchdog import Liveness


class Manager:
    """A service manager's end of the socket."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.settimeout(10.0)

    def hears(self) -> dict[str, str]:
        lines = self.socket.recv(4096).decode().split("\n")
        return dict(line.split("=", 1) for line in lines)

    def hears_nothing(self) -> bool:
        self.socket.setblocking(False)
        try:
            return not self.socket.recv(4096)
        except BlockingIOError:
            return True


@pytest.fixture(params=["path", "abstract"])
def manager(request: Any, tmp_path: Path) -> Iterator[Manager]:
    if request.param == "abstract" and sys.platform != "linux":
        pytest.skip("abstract names are Linux's")
    found = Manager(f"@spotheal-test-{os.getpid()}" if request.param == "abstract" else str(tmp_path / "notify"))
    yield found
    found.socket.close()


class Clock(SystemClock):
    """Time is what the test says."""

    seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float, until: Any = None) -> bool:
        self.seconds += seconds
        return until is not None and bool(until.is_set())


def test_the_manager_hears_ready_alive_and_stopping(manager: Manager) -> None:
    notifier = Notifier(manager.address, 30.0)
    assert notifier.ready("healing\nthe volume")
    assert {"READY": "1", "STATUS": "healing the volume"} == manager.hears()  # a line break would forge a field
    assert notifier.alive()
    assert {"WATCHDOG": "1"} == manager.hears()
    assert notifier.status("training at step 7")
    assert {"STATUS": "training at step 7"} == manager.hears()
    assert notifier.stopping()
    assert {"STOPPING": "1"} == manager.hears()


def test_what_the_manager_left_in_the_environment_is_taken_out() -> None:
    environment = {"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "180000000", "WATCHDOG_PID": str(os.getpid()), "A": "b"}
    assert 180.0 == Notifier.from_environment(environment).watchdog_seconds
    assert {"A": "b"} == environment


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WATCHDOG_USEC": "1000000"},
        {"NOTIFY_SOCKET": "/run/n"},
        {"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "0"},
        {"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "soon"},
        {"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"},
        {"NOTIFY_SOCKET": "vsock:2:1234", "WATCHDOG_USEC": "1000000"},
    ],
)
def test_no_watchdog_is_fed_where_none_watches_us(environment: dict[str, str]) -> None:
    assert Notifier.from_environment(environment).watchdog_seconds is None


def test_a_manager_that_is_not_there_is_no_fault(tmp_path: Path) -> None:
    assert not Notifier().ready()
    assert not Notifier(str(tmp_path / "gone"), 30.0).alive()


def test_a_loop_that_does_not_move_keeps_the_agent_from_being_called_alive(manager: Manager) -> None:
    clock = Clock()
    liveness = Liveness(clock, Notifier(manager.address, 60.0))
    beat = liveness.expect("watch", 120.0)
    liveness.expect("healing", 1200.0)
    clock.seconds = 119.0
    assert liveness.tell()
    assert {"WATCHDOG": "1"} == manager.hears()
    beat()
    clock.seconds = 238.0
    assert liveness.tell()
    assert {"WATCHDOG": "1"} == manager.hears()
    clock.seconds = 240.0
    assert {"watch": 121.0} == liveness.late()
    assert not liveness.tell()
    assert {"STATUS": "hangs: nothing has come from watch for 121 s"} == manager.hears()
    beat()
    assert liveness.tell()


def test_a_loop_that_was_released_is_not_waited_for(manager: Manager) -> None:
    clock = Clock()
    liveness = Liveness(clock, Notifier(manager.address, 60.0))
    beat = liveness.expect("healing", 10.0)
    liveness.release("healing")
    beat()
    clock.seconds = 99.0
    assert liveness.tell()


def test_the_watch_says_ready_and_then_alive_until_it_is_stopped(manager: Manager) -> None:
    stop = threading.Event()
    liveness = Liveness(SystemClock(), Notifier(manager.address, 0.2))
    thread = threading.Thread(target=liveness.watch, args=(stop, lambda: "training"))
    thread.start()
    try:
        assert {"READY": "1", "STATUS": "training"} == manager.hears()
        assert [{"WATCHDOG": "1"}, {"STATUS": "training"}] * 2 == [manager.hears() for _ in range(4)]
    finally:
        stop.set()
        thread.join()


def test_without_a_watchdog_the_watch_ends_at_once(manager: Manager) -> None:
    Liveness(SystemClock(), Notifier(manager.address)).watch(threading.Event())
    assert {"READY": "1"} == manager.hears()
    assert manager.hears_nothing()


def test_a_frozen_agent_is_not_heard(tmp_path: Path) -> None:
    """What systemd sees of a process that hangs as a whole: nothing."""
    manager = Manager(str(tmp_path / "notify"))
    program = (
        "import threading\n"
        "from spotheal.agent.protocol.clock import SystemClock\n"
        "from spotheal.agent.record.watchdog import Liveness\n"
        "from spotheal.agent.machine.systemd_notify import Notifier\n"
        "Liveness(SystemClock(), Notifier.from_environment()).watch(threading.Event())\n"
    )
    environment = {**os.environ, "NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "200000"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    process = subprocess.Popen([sys.executable, "-c", program], env=environment)
    try:
        assert {"READY": "1"} == manager.hears()
        assert {"WATCHDOG": "1"} == manager.hears()
        process.send_signal(19)  # SIGSTOP
        time.sleep(0.1)
        while not manager.hears_nothing():
            pass
        time.sleep(0.5)
        assert manager.hears_nothing()
    finally:
        process.kill()
        process.wait()
        manager.socket.close()


def test_between_two_lives_of_one_process_the_manager_still_hears_of_it(manager: Manager) -> None:
    liveness = Liveness(SystemClock(), Notifier(manager.address, 0.4))
    liveness.expect("the heartbeat", 0.0)
    liveness.release("the heartbeat")
    liveness.start(lambda: "first")
    assert {"READY": "1", "STATUS": "first"} == manager.hears()
    liveness.start(lambda: "second")  # no second thread, and not ready a second time
    heard = [manager.hears() for _ in range(4)]
    assert {"READY"} & {name for one in heard for name in one} == set()
    assert {"STATUS": "second"} in heard and {"WATCHDOG": "1"} in heard
