"""A machine whose agent never said who it is: status and --wait give the cause from its console."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError

from spotheal.agent.aws.ec2 import Instance
from spotheal.fleet.status import unheard
from spotheal.fleet.status.unheard import Consoles, Unheard, cause, silent_machine

NOON = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)
CONSOLE = """\
[   12.3] cloud-init[700]:   File "/opt/spotheal/bootstrap.py", line 3
[   12.3] cloud-init[700]: SyntaxError: f-string: unmatched '['
[   12.4] cloud-init[700]: spotheal: this machine cannot start the job: bootstrap.py died in python3
[   12.4] cloud-init[700]: spotheal: it stays up, since nothing here can count that failure; next: fleetctl cancel

Debian GNU/Linux 12 ip-10-0-0-1 ttyS0
"""


def instance(name: str, seconds: float, state: str = "running") -> Instance:
    return Instance(name, state, "us-west-2a", "g5.xlarge", NOON - timedelta(seconds=seconds))


def test_the_cause_is_the_last_line_of_the_user_data_with_the_error_before_it() -> None:
    assert cause(CONSOLE) == "bootstrap.py died in python3 (SyntaxError: f-string: unmatched '[')"


def test_a_console_without_such_a_line_gives_its_last_one() -> None:
    assert cause("GRUB\n\nKernel panic - not syncing: VFS\n") == "Kernel panic - not syncing: VFS"
    assert cause("") == ""


@pytest.mark.parametrize(
    ("launch", "silent"),
    [
        (None, True),  # nothing was counted
        ({"outcome": "booting"}, True),  # the bootstrap has counted it, and no agent
        ({"outcome": "booting", "starts": 1}, False),
        ({"outcome": "boot failed"}, False),  # the store has the reason
        ({"outcome": "training", "starts": 1}, False),
    ],
)
def test_a_machine_is_silent_until_its_agent_has_counted_a_start(launch: dict[str, Any] | None, silent: bool) -> None:
    launches = [{"instance": "i-1", **launch}] if launch else []
    found = silent_machine(launches, [instance("i-1", 181)], NOON)
    assert (found is not None) == silent


def test_a_young_machine_and_one_that_is_gone_are_not_silent() -> None:
    assert silent_machine([], [instance("i-1", 179), instance("i-2", 900, "terminated")], NOON) is None


def test_the_oldest_is_named() -> None:
    found = silent_machine([], [instance("i-1", 200), instance("i-2", 300)], NOON)
    assert found is not None and found.id == "i-2"


class Ec2:
    """`nitro`: whether the machine shows its latest console."""

    def __init__(self, nitro: bool) -> None:
        self.nitro, self.asked = nitro, 0

    def get_console_output(self, InstanceId: str, Latest: bool = False) -> dict[str, str]:
        if Latest and not self.nitro:
            raise ClientError({"Error": {"Code": "UnsupportedOperation"}}, "GetConsoleOutput")
        self.asked += 1
        return {"Output": CONSOLE}


@pytest.mark.parametrize("nitro", [True, False])
def test_a_console_is_read_once_a_minute(nitro: bool) -> None:
    ec2, clock = Ec2(nitro), SimpleNamespace(now=0.0)
    session: Any = SimpleNamespace(client=lambda service: ec2)
    reading: Any = SimpleNamespace(monotonic=lambda: clock.now, now=lambda: NOON)
    consoles = Consoles(reading)
    for clock.now, asked in ((0.0, 1), (59.0, 1), (60.0, 2)):
        found = consoles.find(session, [], [instance("i-1", 200)])
        assert found == Unheard("i-1", 200.0, cause(CONSOLE))
        assert ec2.asked == asked


def test_the_next_step_is_to_cancel() -> None:
    document = Unheard("i-1", 200.0, "why").to_document("digits")
    assert document["next_step"].startswith("`fleetctl cancel digits` ends it")
    assert unheard.in_words(document) == ("i-1 runs for 3 min and its agent has not started; its console says: why")
