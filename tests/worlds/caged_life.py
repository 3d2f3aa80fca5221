"""One life of a whole agent whose machine is all its own: real user, sandbox, nftables. Run by test_cage_life.py in a
network namespace of its own, as `caged_life.py FOLDER`; prints what came of it as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import agent_world
from agent_world import AgentWorld, FolderHost

from spotheal.agent.cage import user as cage_user
from spotheal.agent.files.paths import Paths
from spotheal.agent.life import stages
from spotheal.agent.processes.group import owned_by

USER = "spotheal-test-l"
TRAINER = """
import json, os, pathlib, subprocess, sys, time, urllib.error, urllib.request

def ask(path, method="GET", **headers):
    request = urllib.request.Request("http://169.254.169.254" + path, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""

def may(path):
    try:
        pathlib.Path(path).touch()
        return True
    except OSError:
        return False

def is_of_setup(pid):
    try:
        return b"sleep\\x00301\\x00" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False

token = ask("/latest/api/token", "PUT", **{"X-aws-ec2-metadata-token-ttl-seconds": "60"})[1]
head = {"X-aws-ec2-metadata-token": token}
env = os.environ
daemon = "(env -i setsid sleep 300 </dev/null >/dev/null 2>&1 &)"
subprocess.run(["/bin/sh", "-c", daemon])
places = ("/etc", "/usr", "/tmp", "/var/tmp", "/dev/shm", env["HOME"], ".", env["SPOTHEAL_CHECKPOINT_DIR"],
          env["SPOTHEAL_RESULTS_DIR"])
roles = "/latest/meta-data/iam/security-credentials/"
found = {
    "uid": os.getuid(),
    "credentials": ask(roles, **head)[0],
    "user_data": ask("/latest/user-data", **head)[0],
    "notice": ask("/latest/meta-data/spot/instance-action", **head)[0],
    "secret": env.get("SECRET"),
    "endpoint": env["AWS_EC2_METADATA_SERVICE_ENDPOINT"].rpartition(":")[0],
    "writes": [place for place in places if may(place + "/of-a-caged-trainer")],
    "aws": sorted(name for name in env if name.startswith("AWS_")),
    "left_by_setup": [pid for pid in os.listdir("/proc") if pid.isdigit() and is_of_setup(pid)],
    "no_new_privs": "NoNewPrivs:\\t1" in open("/proc/self/status").read(),
}
progress = pathlib.Path(env["SPOTHEAL_PROGRESS_FILE"])
new = progress.with_name("new")
new.write_text(json.dumps({"step": 7, "saved": {"step": 7, "path": "x", "time": ""}}))
os.replace(new, progress)
pathlib.Path(env["SPOTHEAL_RESULTS_DIR"], "found.json").write_text(json.dumps(found))
"""

# Hides from all but the cage's end: of no session or variable of the run, and marked as a program of the agent.
LEAVE = ["/bin/sh", "-c", "env -i SPOTHEAL_AGENT_PID=$PPID setsid sleep 301 </dev/null >/dev/null 2>&1 & sleep 1"]


class WholeMachine(Paths):
    """Below a folder all the same."""

    @property
    def is_whole_machine(self) -> bool:
        return True


class Unplugged(FolderHost):
    """This machine is not switched off."""

    def power_off(self) -> None:
        return None


class Parameters:
    """SSM with one parameter."""

    def get_parameters(self, Names: list[str], WithDecryption: bool) -> dict[str, Any]:
        return {"Parameters": [{"Name": name, "Value": "canary-of-a-caged-life"} for name in Names]}


def main(folder: Path) -> None:
    agent_world.Paths = WholeMachine  # type: ignore[misc]
    agent_world.FolderHost = Unplugged  # type: ignore[misc]
    etc = folder / "etc"
    etc.mkdir()
    make = cage_user.cage_account
    from spotheal.agent.cage import cage

    cage.cage_account = lambda user, home, sandbox: make(user, home, sandbox, etc)
    job = {"job": {"python": "/usr/bin/python3", "setup": [LEAVE]},
           "cage": {"mode": "on", "user": USER}, "secrets": {"SECRET": "ssm:/x"}}
    world = AgentWorld(folder, TRAINER, job, client=lambda service: Parameters())
    stages.SHUTDOWN_SECONDS = 5.0
    code = world.live()
    from spotheal.agent.cage.user import pwd

    results = json.loads(world.store.get_bytes("results/found.json") or b"null")
    kept = {key: (world.store.get_bytes(key) or b"").decode("utf-8", "replace") for key, _ in world.store.sizes()}
    uid = pwd.getpwnam(USER).pw_uid
    status = {name: world.status().get(name) for name in ("phase", "reason")}
    leaks = [key for key, text in kept.items() if "canary-of-a-caged-life" in text and key != "results/found.json"]
    left = sorted(owned_by(uid))
    print(json.dumps({"code": int(code), "status": status, "found": results, "uid": uid, "left": left, "leaks": leaks}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
