"""Attempts to get out of a real cage: each is refused with the errno that is expected, or comes back with nothing.

The attempts are in attempts.py, what they are after in siege.py. A new way out is first an attempt here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attempts import EXPECTED, IMDS, IMDS6, TASK_ROLE
from own_network import needs, own_network

from spotheal.agent.processes.refusals import TOLD_MAX

HERE = Path(__file__).resolve().parent
SPACE = USER = f"spotheal-s{os.getpid()}"
ADDRESSES = (f"{IMDS}/32", f"{TASK_ROLE}/32", "169.254.170.23/32", f"{IMDS6}/128", "fd00:ec2::23/128")
pytestmark = needs("ip", "nft", "useradd")


@pytest.fixture(scope="module")
def siege() -> Iterator[dict[str, Any]]:
    with own_network(SPACE, USER, ADDRESSES) as network:
        done = network.run_script(HERE / "siege.py", "on", USER, beside=("attacks",))
        yield json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("attempt", EXPECTED)
def test_an_attempt_to_get_out_of_the_cage_is_refused(attempt: str, siege: dict[str, Any]) -> None:
    assert siege["outcomes"][attempt] in EXPECTED[attempt]


def test_nothing_of_what_lies_outside_came_back(siege: dict[str, Any]) -> None:
    open_here = {"an abstract socket of root"} if "REAL SERVICE" in EXPECTED["an abstract socket of root"] else set()
    assert {name for name, outcome in siege["outcomes"].items() if "REAL" in outcome} <= open_here


def test_no_refusal_ends_a_program_and_nothing_is_left(siege: dict[str, Any]) -> None:
    assert (siege["exit_code"], siege["said"], siege["left"]) == (0, [], [])


def test_the_log_tells_the_first_refused_call_of_each_kind_and_not_without_end(siege: dict[str, Any]) -> None:
    told = [line["call"] for line in siege["told"]]
    assert len(told) == len(set(told)) == TOLD_MAX
    assert told[0] == "socket(family 3, type 1, protocol 0)"
    assert siege["told"][0]["program"] == "python3" and 'mode = "calls"' in siege["told"][0]["next_step"]
