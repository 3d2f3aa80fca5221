"""Debian's own cloud-init and systemd run the rendered user data: from the request to the end of the run.

A boot takes seconds, so each test is a story; skipped where a Debian root cannot be made, with the reason.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from booted_cloud import booted_cloud, nspawn, request, until
from booted_machine import BootedMachine
from caged import the_secret_reached_the_trainer_alone, the_trainer_is_caged
from debian_root import CannotMake, debian_root

from spotheal.agent.protocol.names import LAYOUT, Phase
from spotheal.fleet.rehearsal.scenarios.cloud import Cloud
from spotheal.fleet.rehearsal.scenarios.scenario import Interrupt

pytestmark = [pytest.mark.root, pytest.mark.processes]
PROGRAMS = {
    "systemd-nspawn": "systemd-container", "dnsmasq": "dnsmasq-base", "ip": "iproute2", "losetup": "mount",
    "git": "git", "unshare": "util-linux",
}  # fmt: skip
# For a machine that others use too. What it took is printed.
SECONDS_MAX = 600.0


# `make boot-test` boots the newest Debian too, with the newest Python.
SUITES = os.environ.get("SPOTHEAL_DEBIANS", "stable").split()


@pytest.fixture(scope="module", params=SUITES)
def debian(request: pytest.FixtureRequest) -> Path:
    if os.geteuid() != 0:
        pytest.skip("needs root: namespaces, loop devices, a Debian root")
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (apt-get install {package})")
    try:
        return debian_root("" if request.param == "stable" else request.param)
    except CannotMake as why:
        pytest.skip(str(why))


@pytest.fixture
def cloud(debian: Path, tmp_path: Path) -> Iterator[Cloud]:
    with booted_cloud(tmp_path / "cloud", nspawn(debian), 10.0) as cloud:
        yield cloud
        machines = machines_of(cloud)
    for machine in machines:
        machine.remove()


def machines_of(cloud: Cloud) -> list[BootedMachine]:
    return [machine for machine in cloud.machines.all() if isinstance(machine, BootedMachine)]


class Times:
    """How long each part took, printed for `make boot-test`."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def tell(self, what: str) -> None:
        now = time.monotonic()
        print(f"boot-test: {now - self._last:5.1f} s  {what}")
        self._last = now


def told(machine: BootedMachine, what: str) -> str:
    (line,) = [line for line in log(machine, "user-data.log").splitlines() if what in line]
    return line


def log(machine: BootedMachine, name: str = "agent.log") -> str:
    return (machine.root / "var/log/spotheal" / name).read_text()


def unit(machine: BootedMachine, *names: str) -> dict[str, str]:
    asked = machine.run("systemctl", "show", "spotheal-agent", *(f"--property={name}" for name in names))
    return dict(line.partition("=")[::2] for line in asked.splitlines())


def on_volume(machine: BootedMachine, name: str) -> str:
    """A file beside the checkpoints, as the instance sees it; "" where it has no volume (yet)."""
    try:
        return Path(f"/proc/{machine.leader()}/root/dltraining/checkpoints", name).read_text()
    except OSError:
        return ""


def begins(machine: BootedMachine) -> list[int]:
    """The steps that the trainer began at."""
    return [int(line) for line in on_volume(machine, "begins.txt").split()]


def trains_beyond(machine: BootedMachine, attempts: int) -> int:
    """A step, once the trainer was started for the `attempts`th time and has done some."""

    def step() -> int | None:
        begun, now = begins(machine), int(on_volume(machine, "step.txt") or 0)
        return now if len(begun) == attempts and now > begun[-1] + 2 else None

    return until(f"the trainer's start {attempts} goes on", step, SECONDS_MAX)


def test_a_run_from_its_request_to_its_end_through_a_kill_a_reboot_and_a_replacement(
    cloud: Cloud, tmp_path: Path
) -> None:
    times = Times()
    job = request(cloud, tmp_path / "job", 0.1, "xfs")
    times.tell("fleetctl request")
    first = until("an instance", lambda: next(iter(machines_of(cloud)), None), SECONDS_MAX)
    trains_beyond(first, 1)
    times.tell("boot, user data, agent, volume, first steps")
    print("boot-test:         ", told(first, "the agent runs"))
    systemd_and_cloud_init_are_content(first)
    logs_are_plain_for_people(first)
    the_trainer_is_caged(first)
    the_secret_reached_the_trainer_alone(first, {key: job.store.get_bytes(key) or b"" for key, _ in job.store.sizes()})

    times.tell("looked at")
    first.run("systemctl", "kill", "--signal=KILL", "--kill-who=main", "spotheal-agent")
    trains_beyond(first, 2)
    times.tell("the agent is killed, systemd starts it again, next step")
    assert unit(first, "NRestarts")["NRestarts"] == "1"

    first.run("systemctl", "reboot")
    trains_beyond(first, 3)
    times.tell("a reboot, next step")
    assert len(first.boots) == 2 and len(machines_of(cloud)) == 1
    assert log(first, "user-data.log").count("user data, Python") == 1, "user data runs at the first boot only"
    (handed,) = [line for line in log(first).splitlines() if "handed over" in line]
    assert "unmounted=True detached=True" in handed, "at a shutdown volume and network stay until the agent is done"

    first.run("systemctl", "restart", "spotheal-agent")  # as needrestart did after an upgrade
    trains_beyond(first, 4)
    restarted_at = stopped_at(first)
    assert begins(first)[3] == restarted_at, "a restart of the service loses no step"
    times.tell("the service is restarted, next step")

    cloud.make(Interrupt(60.0), first.launch.instance)
    second = until("a successor", lambda: next(iter(machines_of(cloud)[1:]), None), SECONDS_MAX)
    trains_beyond(second, 5)
    times.tell("a notice, handed over, a successor boots, next step")
    begun = begins(second)
    assert begun[0] == 0 and begun == sorted(begun) and begun[1] > 0, "no acknowledged step is done again"
    assert begun[4] == stopped_at(first), "a notice loses no step"

    second.run("touch", "/dltraining/datasets/finish")
    until("the run is done", lambda: job.status().get("phase") == Phase.DONE.value, SECONDS_MAX)
    until("the fleet is cancelled", lambda: all(f.state == "cancelled" for f in cloud.rules.fleets()), SECONDS_MAX)
    times.tell("done, fleet cancelled, machines gone")
    assert job.store.get_bytes("results/sum.txt") == str(job.saved()).encode()
    assert job.saved() > begun[4]
    assert {one.state for one in cloud.rules.instances()} == {"terminated"}


def test_an_installation_that_a_reboot_cut_short_goes_on_at_the_next_boot(cloud: Cloud, tmp_path: Path) -> None:
    request(cloud, tmp_path / "job", 0.1, "xfs")
    cloud.endpoint.store_faults.throttle = 1.0
    machine = until("an instance", lambda: next(iter(machines_of(cloud)), None), SECONDS_MAX)
    logged = machine.root / "var/log/spotheal/user-data.log"
    until("the store is waited for", lambda: logged.exists() and "SlowDown" in logged.read_text(), SECONDS_MAX)
    machine.run("systemctl", "reboot")
    until("the instance boots again", lambda: len(machine.boots) == 2, SECONDS_MAX)
    cloud.endpoint.store_faults.throttle = 0.0
    trains_beyond(machine, 1)
    assert "the agent runs" in told(machine, "the agent runs")


@pytest.mark.skipif("testing" not in SUITES, reason="takes a minute: `make boot-test`")
def test_an_agent_that_cannot_stay_up_is_counted_and_its_machine_replaced(cloud: Cloud, tmp_path: Path) -> None:
    """systemd started it again for ever, and the machine cost."""
    job = request(cloud, tmp_path / "job", 0.1, "xfs")
    first = until("an instance", lambda: next(iter(machines_of(cloud)), None), SECONDS_MAX)
    trains_beyond(first, 1)
    module = "/opt/spotheal/agent/lib/python3*/site-packages/spotheal/agent/life/run.py"
    first.run("sh", "-c", f"for file in {module}; do echo 'this is no Python' >$file; done")
    first.run("systemctl", "kill", "--signal=KILL", "--kill-who=main", "spotheal-agent")
    key = LAYOUT.launch(first.launch.instance)
    until("it is counted", lambda: (job.store.get_json(key) or {})["outcome"] == "boot failed", SECONDS_MAX)
    reason = (job.store.get_json(key) or {})["reason"]
    assert reason.startswith("the agent ended 15 times "), reason
    assert "; it last said: " in reason
    assert "SyntaxError" in reason
    second = until("a successor", lambda: next(iter(machines_of(cloud)[1:]), None), SECONDS_MAX)
    trains_beyond(second, 2)


def stopped_at(machine: BootedMachine) -> int:
    """The step that the trainer named when it stopped for the last time."""
    return int(log(machine).rpartition("trainer | stops at step ")[2].split()[0])


def systemd_and_cloud_init_are_content(machine: BootedMachine) -> None:
    names = ("ActiveState", "UnitFileState", "Type", "NRestarts", "WatchdogUSec", "StatusText", "After", "Before")
    agent = unit(machine, *names)
    expected = {"ActiveState": "active", "UnitFileState": "enabled", "Type": "notify", "NRestarts": "0"}
    assert expected == {name: agent[name] for name in expected}
    assert agent["WatchdogUSec"] == "3min"
    assert agent["StatusText"], "the agent has spoken to systemd"
    assert {"dltraining.mount", "network.target", "network-online.target"} <= set(agent["After"].split())
    assert "shutdown.target" in agent["Before"].split()
    assert "dltraining.mount" in machine.run("systemctl", "list-units", "--type=mount", "--plain")
    assert machine.run("systemctl", "is-enabled", "spotheal-install.service") == "enabled"
    assert machine.run("cloud-init", "status") == "status: done"
    assert json.loads(machine.run("cat", "/run/cloud-init/result.json"))["v1"]["errors"] == []
    assert machine.run("systemctl", "--failed", "--plain", "--no-legend") == ""


def logs_are_plain_for_people(machine: BootedMachine) -> None:
    lines = log(machine).splitlines()
    assert any(line.startswith("trainer | attempt 1 begins at step 0") for line in lines)
    assert any("info    healing  action=Ready" in line for line in lines)
    console = (machine.folder / "console.log").read_text()
    assert "info    healing  action=Ready" in console
    assert '{"' not in console + "\n".join(lines)
    journal = machine.run("journalctl", "--unit=spotheal-agent", "--output=cat", "--no-pager").splitlines()
    events = [json.loads(line)["event"] for line in journal if line.startswith("{")]
    assert "healing" in events
