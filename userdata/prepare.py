"""Fills a volume on a short-lived instance: mounts it, runs one command (or unpacks an upload), and switches off.

Run by stub.sh in the place of bootstrap.py; standard library only. config.json beside this file says what to do. What
happens is PUT to two signed addresses every few seconds: a status document and the command's output. Nothing else is
needed of AWS, so the instance's role is the command's alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
from typing import Any

ROOT = os.environ.get("SPOTHEAL_ROOT", "").rstrip("/")
DEVICE_SECONDS = 600.0  # until the operator's fleetctl has attached the volume and the device is there
TOLD_EVERY_SECONDS = 1.0
INSTALL_SECONDS = 600.0
LOG_BYTES_MAX = 512 * 1024  # of the output's end
MIB = 2**20
FOLDERS = ("datasets", "checkpoints", "results", "logs")


class Failed(Exception):
    """The volume cannot be filled; the text says why in one line."""


class Story:
    """What is told: `state` is the document's content, `log` the output so far."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.urls = config["urls"]
        self.log = os.path.join(ROOT + "/var/log/spotheal", "prepare.log")
        self.state: dict[str, Any] = {"schema_version": 1, "phase": "waiting", "exit_code": None, "reason": "",
                                      "done_bytes": 0, "total_bytes": config.get("total_bytes") or None}  # fmt: skip
        open(self.log, "ab").close()

    def tell(self) -> None:
        size = os.path.getsize(self.log)
        start = max(0, size - LOG_BYTES_MAX)
        with open(self.log, "rb") as file:
            file.seek(start)
            text = file.read(LOG_BYTES_MAX)
        self.state.update(log_start=start, log_end=start + len(text), time=time.time())
        put(self.urls["log"], text)
        put(self.urls["status"], json.dumps(self.state).encode())

    def keep_telling(self, stop: threading.Event) -> None:
        while not stop.wait(TOLD_EVERY_SECONDS):
            self.tell()


def put(url: str, body: bytes) -> bool:
    """Three tries; a lost one is told again by the next."""
    headers = {"Content-Type": "application/octet-stream"}
    for attempt in range(3):
        try:
            urllib.request.urlopen(urllib.request.Request(url, body, headers, method="PUT"), timeout=20).close()
            return True
        except OSError as fault:
            sys.stderr.write(f"spotheal: could not report: {fault}\n")
            time.sleep(attempt + 1)
    return False


def run(*argv: str, seconds_max: float | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=seconds_max)


# -------------------------------------------------------------------------------------------------------- the volume
def device_of(volume: str) -> str:
    """The device whose serial is the volume's id; waits for it."""
    serial, limit = volume.replace("-", ""), time.monotonic() + DEVICE_SECONDS
    while time.monotonic() < limit:
        listing = run("lsblk", "--json", "--output", "name,path,serial")
        if listing.returncode == 0:
            for disk in json.loads(listing.stdout)["blockdevices"]:
                if (disk.get("serial") or "").replace("-", "") == serial:
                    return str(disk["path"])
        time.sleep(1.0)
    raise Failed(f"{volume} was not attached within {DEVICE_SECONDS:.0f} s")


def filesystem_of(device: str) -> str:
    """"" where there is none."""
    process = run("blkid", "-p", "-o", "export", device)
    if process.returncode not in (0, 2):
        raise Failed(f"blkid cannot read {device}: {process.stderr.strip()}")
    return dict(line.partition("=")[::2] for line in process.stdout.splitlines()).get("TYPE", "")


def mounted(config: dict[str, Any]) -> str:
    """The mount point, with the volume at it. Only a volume that is marked as new is formatted: if it is blank,
    or if an earlier mkfs of it was cut short and what that left cannot be mounted."""
    device, mount = device_of(config["volume"]), str(ROOT + config["mount"])
    filesystem = filesystem_of(device)
    refusal = mount_at(mount, device, filesystem) if filesystem else "it holds no filesystem"
    if not refusal and config["begun"]:
        note_mkfs(config, "ended")  # before anything is written to it that a later mkfs would lose
    elif refusal and config["format"] and (config["begun"] or not filesystem):
        make_filesystem(device, config)
        refusal = mount_at(mount, device, config["filesystem"])
    if refusal:
        raise Failed("{} cannot be mounted: {}".format(config["volume"], refusal))
    for name in FOLDERS:
        os.makedirs(os.path.join(mount, name), exist_ok=True)
    return mount


def mount_at(mount: str, device: str, filesystem: str) -> str:
    """Why the kernel refuses, "" if it is mounted."""
    os.makedirs(mount, exist_ok=True)
    options = "noatime,nouuid" if filesystem == "xfs" else "noatime"
    process = run("mount", "-t", filesystem, "-o", options, device, mount)
    return (process.stderr.strip() or f"exit code {process.returncode}") if process.returncode else ""


def make_filesystem(device: str, config: dict[str, Any]) -> None:
    """The store knows before mkfs that it begins, and after it that it has ended: a machine that died between the two
    left a volume that nothing could mount and nobody would format (finding D1)."""
    kind = config["filesystem"]
    if not config["begun"]:
        with open(device, "rb") as raw:
            if raw.read(MIB).strip(b"\0"):
                raise Failed("{} is not blank, so it is not formatted".format(config["volume"]))
    note_mkfs(config, "begun")
    force = {"xfs": "-f", "ext4": "-F"}[kind]
    process = run("mkfs." + kind, "-q", *([force] if config["begun"] else []), device)
    if process.returncode:
        raise Failed(f"mkfs.{kind} failed: {process.stderr.strip()}")
    note_mkfs(config, "ended")


def note_mkfs(config: dict[str, Any], state: str) -> None:
    if not put(config["urls"]["mkfs"], json.dumps({"mkfs": state}).encode()):
        raise Failed(f"the store could not be told that mkfs has {state}")


# ------------------------------------------------------------------------------------------------------------ filling
class Parts(io.RawIOBase):
    """The parts of an upload, read one after the other as one stream."""

    def __init__(self, urls: list[str], story: Story, seconds_max: float) -> None:
        self.urls, self.story = list(urls), story
        self.seconds_max, self.limit = seconds_max, time.monotonic() + seconds_max
        self.part: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if time.monotonic() > self.limit:  # the addresses end soon after, and nothing more could be told
                raise Failed(f"unpacking took longer than {self.seconds_max:.0f} s, and was ended")
            if self.part is None:
                if not self.urls:
                    return 0
                self.part = urllib.request.urlopen(self.urls.pop(0), timeout=60)
            data = self.part.read(len(buffer))
            if data:
                buffer[: len(data)] = data
                self.story.state["done_bytes"] += len(data)
                return len(data)
            self.part.close()
            self.part = None


def unpack(config: dict[str, Any], mount: str, story: Story) -> int:
    with urllib.request.urlopen(config["urls"]["parts"], timeout=60) as answer:
        urls = json.load(answer)["urls"]
    target = os.path.realpath(os.path.join(mount, "datasets", config["to"]))
    if not (target + "/").startswith(os.path.realpath(mount) + "/"):
        raise Failed("{} is outside the volume".format(config["to"]))
    os.makedirs(target, exist_ok=True)
    parts = io.BufferedReader(Parts(urls, story, config["seconds_max"]), 4 * MIB)
    with tarfile.open(fileobj=parts, mode="r|") as archive:
        for member in archive:
            if hasattr(tarfile, "data_filter"):
                archive.extract(member, target, filter="data")
            else:
                archive.extract(member, target)
    return 0


def install_aws(path: str) -> None:
    """Ubuntu's own images have no `aws`, and its snap is the AWS CLI there; Debian packages it. Others bring it."""
    if shutil.which("aws", path=path):
        return
    if shutil.which("snap", path=path):
        # Minutes after a first boot snapd refuses: "too early for operation, device not yet seeded".
        steps = [["snap", "wait", "system", "seed.loaded"], ["snap", "install", "aws-cli", "--classic"]]
    else:
        steps = [["apt-get", "update", "-q"], ["apt-get", "install", "-q", "-y", "awscli"]]
    for step in steps:
        try:
            process = run(*step, seconds_max=INSTALL_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as fault:
            reason = f"{fault}"
        else:
            if process.returncode == 0:
                continue
            reason = process.stderr.strip() or f"exit code {process.returncode}"
        raise Failed(
            "the image has no program `aws`, and `{}` failed: {}. Write --image AMI with one that has it: the Deep "
            "Learning AMIs do".format(" ".join(step), reason)
        )


def command(config: dict[str, Any], mount: str, story: Story) -> int:
    datasets = os.path.join(mount, "datasets")
    environment = dict(os.environ, HOME=os.environ.get("HOME") or "/root", AWS_REGION=config["region"],
                       SPOTHEAL_DATASETS_DIR=datasets, PYTHONUNBUFFERED="1")  # fmt: skip
    extra = ["/opt/pytorch/bin", "/snap/bin", "/usr/local/bin"]
    environment["PATH"] = ":".join([environment.get("PATH", "/usr/bin:/bin"), *extra])
    argv = config["command"]
    if argv[0] == "aws":
        install_aws(environment["PATH"])
    with open(story.log, "ab") as log:
        try:
            child = subprocess.Popen(argv, cwd=datasets, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                                     stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        except OSError as fault:
            log.write(f"{argv[0]}: {fault.strerror}\n".encode())
            return 127
        try:
            return child.wait(config["seconds_max"])
        except subprocess.TimeoutExpired:
            raise Failed("the command ran for {:.0f} s, and was ended".format(config["seconds_max"])) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # what it left running would hold the volume


def fill(config: dict[str, Any], story: Story) -> None:
    mount = mounted(config)
    story.state["phase"] = "running"
    story.tell()
    try:
        code = command(config, mount, story) if config.get("command") else unpack(config, mount, story)
        story.state["exit_code"] = code
        used = os.statvfs(mount)
        story.state["free_bytes"] = used.f_bavail * used.f_frsize
    finally:
        run("sync")
        for _ in range(5):  # else the machine's shutdown unmounts it
            if run("umount", mount).returncode == 0:
                break
            time.sleep(1.0)


def main() -> int:
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    story = Story(config)
    stop = threading.Event()
    telling = threading.Thread(target=story.keep_telling, args=(stop,), daemon=True)
    telling.start()
    try:
        fill(config, story)
        story.state["phase"] = "done"
    except (Failed, OSError, ValueError, KeyError, tarfile.TarError) as fault:
        story.state.update(phase="failed", reason=f"{fault}" or type(fault).__name__)
    finally:
        stop.set()
        telling.join(30)
        story.tell()
        run("shutdown", "-h", "now")
    return 0


if __name__ == "__main__":
    sys.exit(main())
