"""A real cage, with what an attacker wants around it. `siege.py FOLDER MODE USER`, as root in a network namespace that
has the addresses of the metadata service; prints what came of each attempt as JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from attempts import IMDS, IMDS6, NFS, TASK_ROLE

from spotheal.agent.cage import cage
from spotheal.agent.cage import user as cage_user
from spotheal.agent.files.folders import Folders
from spotheal.agent.files.paths import Paths
from spotheal.agent.processes.group import ForeignProgram
from spotheal.agent.processes.system_calls import MACHINES, refused_calls
from spotheal.agent.protocol.clock import SystemClock
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job import parse_job
from spotheal.agent.protocol.names import StoreUrl

PYTHON = "/usr/bin/python3"
SHARED_MEMORY = 0x5B07
QUEUES = Path("/dev/mqueue")
SECONDS_MAX = 60.0


class WholeMachine(Paths):
    """Below a folder all the same."""

    @property
    def is_whole_machine(self) -> bool:
        return True


class Log:
    """Keeps what the agent would say."""

    def __init__(self) -> None:
        self.warnings: list[dict[str, str]] = []

    def warning(self, event: str, **fields: str) -> None:
        self.warnings.append({"event": event, **fields})

    def info(self, event: str, **fields: str) -> None:
        return None

    error = warning


class Service(BaseHTTPRequestHandler):
    """What the trainer must not reach."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"REAL SERVICE")

    do_PUT = do_GET

    def log_message(self, format: str, *arguments: Any) -> None:
        return None


class Service6(ThreadingHTTPServer):
    address_family = socket.AF_INET6


def listen(address: str) -> None:
    """A service of root's that all may connect to."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    if not address.startswith("\0"):
        os.chmod(address, 0o777)
    server.listen()

    def serve() -> None:
        while True:
            server.accept()[0].send(b"REAL SERVICE")

    threading.Thread(target=serve, daemon=True).start()


def services() -> None:
    places = [(IMDS, 80), (IMDS, 8080), (IMDS6, 80), (TASK_ROLE, 80), ("169.254.170.23", 80), ("fd00:ec2::23", 80)]
    for address, port in [*places, (NFS, 2049)]:
        kind = Service6 if ":" in address else ThreadingHTTPServer
        threading.Thread(target=kind((address, port), Service).serve_forever, daemon=True).start()


def show_queues() -> None:
    """Their files, as systemd mounts them; `ip netns exec` has made the mounts our own."""
    QUEUES.mkdir(exist_ok=True)
    if not os.path.ismount(QUEUES):
        subprocess.run(["mount", "-t", "mqueue", "mqueue", str(QUEUES)], check=True)


def targets(folder: Path, volume: Path, relay_port: int) -> dict[str, Any]:
    os.environ["SECRET"] = "REAL SECRET"
    secret, program = folder / "secret", folder / "set-user-id"
    secret.write_text("REAL SECRET")
    secret.chmod(0o600)
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    on_volume = volume / "set-user-id"
    for copy in (program, on_volume):
        shutil.copy("/usr/bin/id", copy)
        copy.chmod(0o4755)
    temporary = f"spotheal-of-another-{os.getpid()}"
    for place in ("/tmp", "/var/tmp", "/dev/shm"):
        Path(place, temporary).touch()
    libc = ctypes.CDLL(None)
    libc.shmget(SHARED_MEMORY, 4096, 0o1666)
    libc.mq_open(b"/spotheal-attack", os.O_CREAT | os.O_RDWR, 0o666, None)
    show_queues()
    name = f"spotheal-attack-{os.getpid()}"
    listen("\0" + name)
    listen(f"/run/{name}.socket")
    machine = MACHINES[os.uname().machine]
    looked_at = {word: getattr(machine, word) for word in ("socket", "socketpair", "setsockopt", "clone", "unshare")}
    return {
        "agent": os.getpid(), "calls": {**refused_calls(machine), **looked_at}, "secret": str(secret),
        "open_folder": str(folder / "open"), "set_user_id": str(program), "set_user_id_on_the_volume": str(on_volume),
        "temporary": [temporary], "shared_memory": SHARED_MEMORY, "queue": "/spotheal-attack", "abstract": name,
        "service": f"/run/{name}.socket", "late_service": f"/run/{name}-late.socket", "relay": relay_port,
    }  # fmt: skip


def remove(outside: dict[str, Any]) -> None:
    libc = ctypes.CDLL(None)
    libc.mq_unlink(outside["queue"].encode())
    subprocess.run(["umount", str(QUEUES)], check=False)
    with contextlib.suppress(OSError):  # systemd's: it is a mount again, and busy
        QUEUES.rmdir()
    libc.shmctl(libc.shmget(outside["shared_memory"], 0, 0), 0, None)
    places = [f"{place}/{outside['temporary'][0]}" for place in ("/tmp", "/var/tmp", "/dev/shm")]
    for path in (*places, outside["service"], outside["late_service"]):
        Path(path).unlink(missing_ok=True)


def attack(folder: Path, mode: str, user: str) -> dict[str, Any]:
    (folder / "etc").mkdir()
    make = cage_user.cage_account
    cage.cage_account = lambda name, home, sandbox: make(name, home, sandbox, folder / "etc")
    document = {"job": {"name": "j", "repository": "https://example.org/r", "command": ["x"]},
                "cage": {"mode": mode, "user": user}}  # fmt: skip
    config = InstanceConfig(parse_job(document), "run", "us-west-2", StoreUrl("b", "j/run"), "0" * 40)
    folders, clock, log = Folders.at(folder, "/volume"), SystemClock(), Log()
    folders.clone.mkdir(parents=True)
    caged = cage.enclose(config, WholeMachine(folder), folders, clock, log, ask=lambda path: None)
    assert caged.account is not None and caged.relay is not None
    folders.make(caged.account)
    os.chown(folders.clone, caged.account.uid, caged.account.gid)
    services()
    outside = targets(folder, folders.checkpoints, caged.relay.port)
    script = folders.clone / "attempts.py"
    shutil.copy(Path(__file__).with_name("attempts.py"), script)
    lines: list[str] = []
    ended = threading.Event()
    program = ForeignProgram(
        ["/bin/sh", "-c", 'while ! test -e started; do sleep 0.01; done; exec "$@"', "sh", PYTHON, "-I", str(script),
         json.dumps(outside)],
        directory=folders.clone, environment={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "RUN": str(folder)},
        account=caged.account, on_line=lines.append, on_end=ended.set, mark="RUN",
    )  # fmt: skip
    listen(outside["late_service"])
    (folders.clone / "started").touch()
    ended.wait(SECONDS_MAX)
    left = program.end_all(clock)
    caged.leave(clock)
    remove(outside)
    outcomes = json.loads((folders.clone / "outcomes.json").read_text())
    return {"outcomes": outcomes, "said": lines, "told": log.warnings, "left": left, "exit_code": program.exit_code}


if __name__ == "__main__":
    print(json.dumps(attack(Path(sys.argv[1]), *sys.argv[2:4])))
