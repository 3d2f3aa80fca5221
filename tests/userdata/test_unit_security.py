"""What systemd says of the rights of our services: each open line is named in docs/safety.md with its reason."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from spotheal import userdata
from spotheal.userdata import bootstrap, start

ROOT = Path(__file__).resolve().parents[2]
# The text of each unit, and the mark of its table.
UNITS = {
    "spotheal-agent": (userdata.unit(), "unit"),
    "spotheal-failed": (start.FAILED_UNIT, "failed unit"),
    "spotheal-install": (bootstrap.INSTALL_UNIT, "install unit"),
}


def lines(name: str, place: Path) -> list[dict[str, Any]]:
    """As this machine's systemd knows them: `name`, `exposure` (None where it does not matter) and others."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    unit = place / f"{name}.service"
    unit.write_text(UNITS[name][0])
    asked = ["systemd-analyze", "security", "--offline=true", "--json=short", str(unit)]
    done = subprocess.run(asked, capture_output=True, text=True)
    if not done.stdout.startswith("["):
        pytest.skip(f"needs systemd 250 or newer: {done.stderr.strip()[-200:]}")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def reasons(mark: str) -> dict[str, str]:
    table = re.search(rf"<!-- {mark} -->\n(.*?)<!-- end {mark} -->", (ROOT / "docs/safety.md").read_text(), re.DOTALL)
    assert table is not None
    found = {}
    for row in table[1].splitlines()[2:]:
        names, reason = re.split(r"(?<!\\)\|", row)[1:3]
        found |= {name.replace("\\|", "|"): reason.strip() for name in re.findall(r"`([^`]+)`", names)}
    return found


@pytest.mark.parametrize("name", UNITS)
def test_each_open_line_of_a_unit_is_named_with_its_reason_and_no_other(name: str, tmp_path: Path) -> None:
    known = lines(name, tmp_path)
    still_open = {line["name"] for line in known if float(line["exposure"] or 0) > 0}
    named = reasons(UNITS[name][1])
    assert still_open - named.keys() == set()
    assert named.keys() & {line["name"] for line in known} - still_open == set()
    assert all(named.values())


@pytest.mark.parametrize("name", ["spotheal-agent", "spotheal-failed"])
def test_rights_that_nothing_of_a_unit_needs_are_taken(name: str, tmp_path: Path) -> None:
    taken = {line["name"] for line in lines(name, tmp_path) if line["set"]}
    for right in ("SYS_TIME", "SYS_RAWIO", "SYSLOG", "MAC_*", "BPF", "LEASE", "LINUX_IMMUTABLE", "SYS_PACCT"):
        assert f"CapabilityBoundingSet=~CAP_{right}" in taken
