"""The Pythons of this machine that an operator or an instance may have: one of each minor version from 3.10 on."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

MINORS = range(10, 15)  # of Python 3: fleetctl and the agent need 3.10
_ASK = "import ssl, sys, zlib; print(sys.version_info[0], sys.version_info[1])"


@cache
def pythons() -> dict[str, str]:
    """{"3.10": path of its program, ...}: the one that runs this first, then those of PATH, then pyenv's."""
    places = [sys.executable, *(f"python3.{minor}" for minor in MINORS), "/usr/bin/python3"]
    places += map(str, sorted((Path.home() / ".pyenv/versions").glob("3.*/bin/python3")))
    found: dict[str, str] = {}
    for place in places:
        version = _version(place)
        if version in {f"3.{minor}" for minor in MINORS}:
            found.setdefault(version, place)
    return dict(sorted(found.items(), key=lambda item: int(item[0].partition(".")[2])))


def _version(program: str) -> str:
    """ "" for what does not run, as pyenv's stand-ins of versions that are not chosen."""
    try:
        done = subprocess.run([program, "-I", "-c", _ASK], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip().replace(" ", ".") if done.returncode == 0 else ""
