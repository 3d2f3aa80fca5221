"""The first program of a virtual machine: the metadata service, an NFS server, the cage's rules, and trainers that try
sockets which belong to nobody. Prints what came of it as one line of JSON and switches the machine off.

It runs as `python3 besieged_guest.py`, with spotheal's agent beside it and the standard library alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
IMDS, NFS = "169.254.169.254", "127.0.0.9"
UID = 54321
TRIES = """
import ctypes, errno, signal, socket, struct
LIBC = ctypes.CDLL(None, use_errno=True)
def late(number, frame):
    raise TimeoutError(errno.ETIMEDOUT, "no answer")
signal.signal(signal.SIGALRM, late)
def ask(client, address, port):
    signal.alarm(10)
    try:  # Python's own connect does not know the family
        place = struct.pack("=HH4s8x", socket.AF_INET, socket.htons(port), socket.inet_aton(address))
        if LIBC.connect(client.fileno(), place, len(place)) != 0:
            raise OSError(ctypes.get_errno(), "connect")
        client.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
        return client.recv(100).decode() or "closed"
    except OSError as error:
        return errno.errorcode.get(error.errno, repr(error))
def smc():
    return socket.socket(43, socket.SOCK_STREAM, 0)
def upgraded():
    client = socket.socket()
    client.setsockopt(6, 31, b"smc")
    return client
places = [("imds", "169.254.169.254", 80), ("nfs", "127.0.0.9", 2049)]
for word, make in (("tcp", socket.socket), ("smc", smc), ("upgraded", upgraded)):
    for name, address, port in places:
        try:
            print(word, name, ask(make(), address, port), flush=True)
        except OSError as error:
            print(word, name, "no socket:", error.strerror, flush=True)
"""


def serve(address: str, port: int, words: bytes) -> list[float]:
    """Answers each connection with `words`; gives the times of them."""
    server, seen = socket.create_server((address, port)), list[float]()

    def run() -> None:
        while True:
            client, _ = server.accept()
            seen.append(time.monotonic())
            client.recv(4096)
            client.sendall(words)
            client.close()

    threading.Thread(target=run, daemon=True).start()
    return seen


def trainer(limits_calls: bool, told: list[str]) -> list[str]:
    from spotheal.agent.processes.account import Account
    from spotheal.agent.processes.group import ForeignProgram
    from spotheal.agent.processes.sandbox import Sandbox
    from spotheal.agent.protocol.clock import SystemClock

    work = HERE / "work"
    work.mkdir(exist_ok=True)
    os.chown(work, UID, UID)
    sandbox = Sandbox((work,), HERE / "scratch", limits_calls=limits_calls, tell=lambda _, call: told.append(call))
    lines, ended = list[str](), threading.Event()
    program = ForeignProgram(
        ["/usr/bin/python3", "-I", "-c", TRIES], directory=work, environment={"PATH": "/usr/bin:/bin"},
        account=Account("trainer", UID, UID, (), str(work), sandbox), on_line=lines.append, on_end=ended.set,
    )  # fmt: skip
    ended.wait(60)
    program.end_all(SystemClock())
    return lines


def mount_of_efs(seen: list[float]) -> bool:
    """Whether the kernel's own client reaches the server; the mount itself gets no answer that it understands."""
    before = len(seen)
    Path("/mnt").mkdir(exist_ok=True)
    data = f"vers=4.1,proto=tcp,addr={NFS},clientaddr=127.0.0.1,port=2049,soft,timeo=10,retrans=1".encode()
    libc = ctypes.CDLL(None)
    arguments = (f"{NFS}:/".encode(), b"/mnt", b"nfs4", ctypes.c_ulong(0), data)
    threading.Thread(target=libc.mount, args=arguments, daemon=True).start()
    limit = time.monotonic() + 60
    while len(seen) == before and time.monotonic() < limit:
        time.sleep(0.1)
    return len(seen) > before


def siege() -> dict[str, object]:
    for kind, place in (("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", "/tmp"), ("tmpfs", "/dev/shm")):
        subprocess.run(["mount", "-t", kind, kind, place], check=False, capture_output=True)
    for command in ("link set lo up", f"addr add {IMDS}/32 dev lo"):
        subprocess.run(["ip", *command.split()], check=True)
    subprocess.run(["modprobe", "smc"], check=True)  # as the first AF_SMC socket does
    serve(IMDS, 80, b"REAL SERVICE")
    seen = serve(NFS, 2049, b"NFS")
    serve("127.0.0.1", 4444, b"relay")
    sys.path.insert(0, str(HERE))
    from spotheal.agent.cage.network import rules

    before = trainer(False, [])
    subprocess.run(["nft", "-f", "-"], input=rules(UID, 4444), text=True, check=True)
    told: list[str] = []
    found: dict[str, object] = {"without": before, "rules": trainer(False, [])}
    found |= {"cage": trainer(True, told), "told": told}
    root = subprocess.run(["python3", "-I", "-c", TRIES], capture_output=True, text=True)
    found |= {"root": root.stdout.splitlines(), "efs": mount_of_efs(seen)}
    return found


if __name__ == "__main__":
    outcome: dict[str, object] = {"fault": ""}
    try:
        outcome = siege()
    finally:
        if "fault" in outcome:
            outcome = {"fault": traceback.format_exc()}
        with open("/dev/console", "w") as console:
            console.write(f"\nSIEGE {json.dumps(outcome)}\n")
        time.sleep(1)
        ctypes.CDLL(None).reboot(0x4321FEDC)
