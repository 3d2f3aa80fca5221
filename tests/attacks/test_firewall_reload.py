"""The trainer's way to the metadata service while the machine's firewall is loaded anew: real nft, in a namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

IMPORTS = str(Path(__file__).resolve().parents[2] / ".ci/import_path")
# No heartbeat here: what puts the rules back is the watch alone.
INSIDE = """
import sys, time
sys.path.insert(0, sys.argv[1])
from functools import partial
import structlog
from spotheal.agent.processes import programs
from spotheal.agent.cage.cage import Cage
from spotheal.agent.cage.network import close_imds, is_closed
from spotheal.agent.protocol.clock import SystemClock

log = structlog.wrap_logger(structlog.PrintLogger(sys.stderr))
cage = Cage(None, log, _redirect=partial(close_imds, 54321, 4444, log))
cage._redirect()
cage.watch_rules()
time.sleep(1.0)  # until the thread listens
for deed in ("flush ruleset", "delete table inet spotheal", "flush table inet spotheal"):
    assert programs.run(["nft", *deed.split()], seconds_max=10).code == 0
    gone = time.monotonic()
    while not is_closed() and time.monotonic() - gone < 20:
        time.sleep(0.001)
    print(deed, "closed" if is_closed() else "open", f"{time.monotonic() - gone:.3f}", flush=True)
cage.leave(SystemClock())
time.sleep(1.5)
print("after the cage", "closed" if is_closed() else "open", flush=True)
"""


@pytest.mark.root
@pytest.mark.processes
@pytest.mark.skipif(
    os.geteuid() != 0 or any(shutil.which(name) is None for name in ("ip", "nft")),
    reason="needs root, ip and nft: a network namespace with a firewall of its own",
)
def test_rules_that_a_reload_takes_away_are_back_without_a_heartbeat() -> None:
    space = f"spotheal-fw-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", space], check=True)
    try:
        argv = ["ip", "netns", "exec", space, sys.executable, "-c", INSIDE, IMPORTS]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    finally:
        subprocess.run(["ip", "netns", "del", space], check=False)
    print(done.stdout)
    assert [line.rpartition(" ")[0] for line in done.stdout.splitlines()[:3]] == [
        "flush ruleset closed", "delete table inet spotheal closed", "flush table inet spotheal closed",
    ], done.stderr  # fmt: skip
    assert done.stdout.splitlines()[3] == "after the cage open"
    assert "the firewall was loaded anew" in done.stderr
