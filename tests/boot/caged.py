"""What a process in the trainer's cage finds on a booted machine: asked by one that joins the trainer's namespaces."""

from __future__ import annotations

import json
from typing import Any

from booted_machine import BootedMachine

USER = "spotheal-trainer"
SECRET = "canary-of-the-booted-trainer"
# Addresses as foreign code has them written into it; nothing of ours is imported.
_PROBE = """
import json, os, pathlib, subprocess, sys, urllib.error, urllib.request
ADDRESS = "http://169.254.169.254"

def ask(path, method="GET", **headers):
    request = urllib.request.Request(ADDRESS + path, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()

def may(path):
    try:
        pathlib.Path(path, "of-a-caged-trainer").touch()
        return True
    except OSError:
        return False

if sys.argv[1:] == ["child"]:
    print(ask("/latest/meta-data/iam/security-credentials/")[0])
    sys.exit()
token = ask("/latest/api/token", "PUT", **{"X-aws-ec2-metadata-token-ttl-seconds": "60"})[1]
head = {"X-aws-ec2-metadata-token": token}
child = subprocess.run(["setsid", sys.executable, "-I", "-c", sys.argv[1], "child"], capture_output=True, text=True)
folders = ("/etc", "/usr", "/opt/spotheal", "/run", "/var/lib", "/home", "/tmp", "/var/tmp", "/dev/shm",
           "/dltraining/checkpoints", "/dltraining/working-copy", "/var/lib/spotheal/src", "/var/lib/spotheal/home")
print(json.dumps({
    "credentials": ask("/latest/meta-data/iam/security-credentials/", **head)[0],
    "user_data": ask("/latest/user-data", **head)[0],
    "instance_action": ask("/latest/meta-data/spot/instance-action", **head)[0],
    "rebalance": ask("/latest/meta-data/events/recommendations/rebalance", **head)[0],
    "without_token": ask("/latest/meta-data/iam/security-credentials/")[0],
    "child": child.stdout.strip(),
    "writes": [folder for folder in folders if may(folder)],
    "sees": [path for path in ("/run/dbus/system_bus_socket", "/var/lib/cloud/instance", "/opt/spotheal/config.json")
             if os.access(path, os.R_OK)],
}))
"""
EXPECTED: dict[str, Any] = {
    "credentials": 403,
    "user_data": 403,
    "instance_action": 404,
    "rebalance": 404,
    "without_token": 401,
    "child": "401",
    "writes": ["/tmp", "/var/tmp", "/dev/shm", "/dltraining/checkpoints", "/dltraining/working-copy",
               "/var/lib/spotheal/home"],
    "sees": [],
}  # fmt: skip


def the_trainer_is_caged(machine: BootedMachine) -> None:
    pid = machine.run("pgrep", "--uid", USER, "--newest", "--full", "count_steps.py")
    status = machine.run("cat", f"/proc/{pid}/status")
    rows = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    uid = machine.run("id", "--user", USER)
    assert rows["Uid"].split() == [uid] * 4 and (rows["NoNewPrivs"], rows["Seccomp"]) == ("1", "2")
    sets = {name: int(rows[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb")}
    assert not any(sets.values()), sets
    entry = machine.run("getent", "passwd", USER).split(":")
    assert entry[5:] == ["/nonexistent", "/usr/sbin/nologin"]
    become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs", "--bounding-set=-all"]
    found = machine.run(
        "nsenter", "--target", pid, "--mount", "--ipc", "--wdns=/", *become, "python3", "-I", "-c", _PROBE, _PROBE
    )
    assert json.loads(found) == EXPECTED
    roles = machine.run("python3", "-I", "-c", _AS_ROOT)
    assert roles.strip(), "the agent itself still has the instance's role"


_AS_ROOT = """
import urllib.request
def ask(path, method="GET", **headers):
    address = "http://169.254.169.254" + path
    return urllib.request.urlopen(urllib.request.Request(address, method=method, headers=headers))
token = ask("/latest/api/token", "PUT", **{"X-aws-ec2-metadata-token-ttl-seconds": "60"}).read().decode()
print(ask("/latest/meta-data/iam/security-credentials/", **{"X-aws-ec2-metadata-token": token}).read().decode())
"""


def the_secret_reached_the_trainer_alone(machine: BootedMachine, stored: dict[str, bytes]) -> None:
    """`stored`: everything in the store. The trainer's memory is where it belongs, and nowhere else."""
    pid = machine.run("pgrep", "--uid", USER, "--newest", "--full", "count_steps.py")
    assert f"TOKEN={SECRET}" in machine.run("cat", f"/proc/{pid}/environ").split("\0")
    assert [key for key, body in stored.items() if SECRET.encode() in body] == []
    search = ["grep", "--recursive", "--files-with-matches", "--fixed-strings", SECRET, "/var/log", "/etc"]
    search += ["/dltraining", "/opt/spotheal", "/run/spotheal", "/var/lib/spotheal", "/var/lib/cloud"]
    assert machine.run(*search, check=False) == ""
    journal = machine.run("journalctl", "--no-pager", "--output=export")
    assert SECRET not in journal
    assert SECRET not in (machine.folder / "console.log").read_text(errors="replace")
    assert SECRET not in machine.run("ps", "-e", "-o", "args")
