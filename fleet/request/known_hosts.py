"""The host keys of a repository's host that this machine knows: the instances accept no other key.

A new instance knows no key, and would have to trust the first answer. Source: ssh-keygen(1) -F, sshd(8) on the format
of known_hosts.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from urllib.parse import urlsplit

_SCP = re.compile(r"(?:[\w.-]+@)?(\[[^\]]+\]|[\w.-]+):(?!//)")
_SECONDS_MAX = 5.0


def host_of(repository: str) -> str:
    """The host as in known_hosts: `host`, or `[host]:port` if the port is not 22; "" if git would not use ssh."""
    if "://" in repository:
        try:
            parts = urlsplit(repository)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            return ""
        if parts.scheme != "ssh" or not host:
            return ""
        return f"[{host}]:{port}" if port not in (None, 22) else host
    match = _SCP.match(repository)
    return match.group(1).strip("[]") if match and "/" not in repository.partition(":")[0] else ""


def known(repository: str) -> str:
    """Lines of known_hosts for the repository's host; "" if it needs none, or none is known here."""
    host = host_of(repository)
    if not host or host.startswith("-") or shutil.which("ssh-keygen") is None:
        return ""
    try:
        output = subprocess.run(["ssh-keygen", "-F", host], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=_SECONDS_MAX, check=False).stdout  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    rows = [line.split() for line in output.splitlines() if line and line[0] not in "#@"]
    return "".join(f"{host} {row[1]} {row[2]}\n" for row in rows if len(row) >= 3)
