"""What systemd says of the service's rights: each line that is open is named in docs/safety.md with its reason."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "userdata/spotheal-agent.service"


def lines() -> list[dict[str, Any]]:
    """As this machine's systemd knows them: `name`, `exposure` (None where it does not matter) and others."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    asked = ["systemd-analyze", "security", "--offline=true", "--json=short", str(UNIT)]
    done = subprocess.run(asked, capture_output=True, text=True)
    if not done.stdout.startswith("["):
        pytest.skip(f"needs systemd 250 or newer: {done.stderr.strip()[-200:]}")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def reasons() -> dict[str, str]:
    table = re.search(r"<!-- unit -->\n(.*?)<!-- end unit -->", (ROOT / "docs/safety.md").read_text(), re.DOTALL)
    assert table is not None
    found = {}
    for row in table[1].splitlines()[2:]:
        names, reason = re.split(r"(?<!\\)\|", row)[1:3]
        found |= {name.replace("\\|", "|"): reason.strip() for name in re.findall(r"`([^`]+)`", names)}
    return found


def test_each_open_line_of_the_unit_is_named_with_its_reason_and_no_other() -> None:
    known = lines()
    still_open = {line["name"] for line in known if float(line["exposure"] or 0) > 0}
    named = reasons()
    assert still_open - named.keys() == set()
    assert named.keys() & {line["name"] for line in known} - still_open == set()
    assert all(named.values())


def test_rights_that_nothing_of_the_agent_needs_are_taken() -> None:
    taken = {line["name"] for line in lines() if line["set"]}
    for name in ("SYS_TIME", "SYS_RAWIO", "SYSLOG", "MAC_*", "BPF", "LEASE", "LINUX_IMMUTABLE", "SYS_PACCT"):
        assert f"CapabilityBoundingSet=~CAP_{name}" in taken
