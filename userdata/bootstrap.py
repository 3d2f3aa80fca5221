"""Installs the agent from the run's store and starts it. Standard library only; runs on a bare instance.

    bootstrap.py MANIFEST_SHA256 [STUCK]   install what the store's manifest names, then start the agent;
                                           with STUCK, why this boot cannot go on, only report that

Everything lies below $SPOTHEAL_ROOT (default /). The launch is counted in the store before anything else can fail, so
that boots that never reach the agent are counted too. Each file must have the sha256 that the user data vouches for.
The agent needs Python 3.10; this must run on any that report.py runs on, to say so.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from typing import Any

from spotheal.userdata.report import (
    REPORTED,
    ROOT,
    Aws,
    Metadata,
    Stuck,
    configuration,
    count_launch,
    patiently,
    read,
    record_failure,
    say,
)

HOME = ROOT + "/opt/spotheal"
AGENT_PYTHON = HOME + "/agent/bin/python"
PYTHON_MIN = (3, 10)
ADVICE = "Choose one that has it: Debian 12, Ubuntu 22.04, a PyTorch Deep Learning AMI"
UNITS = "/etc/systemd/system/"
# User data runs at the first boot only. A machine that goes down in the middle of it goes on here at the next one.
INSTALL_UNIT = """[Unit]
Description=spotheal: the installation of the agent that the last boot did not finish
After=network-online.target
Wants=network-online.target
ConditionPathExists=!/etc/systemd/system/multi-user.target.wants/spotheal-agent.service

[Service]
Type=oneshot
ExecStart={python} -EsB {home}/bootstrap.py {manifest}
StandardOutput=journal+console
StandardError=journal+console

[Install]
WantedBy=multi-user.target
"""
SITE = f"/agent/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


# -------------------------------------------------------------------------------------------------------- installation
def fetch(aws: Aws, manifest_sha256: str) -> dict[str, bytes]:
    """{file name: content} of the wheels, each with the sha256 that the manifest gives, the manifest with ours."""
    listed = dict(aws.listed("agent/"))  # S3 may say 403 of what is not, which would be waited for (`document`)

    def object_of(label: str, key: str) -> bytes:
        if key not in listed:
            raise Stuck(f"could not read the store's {label}: it is not there; `fleetctl request` it again")
        return patiently(f"read the store's {label}", lambda: aws.store("GET", key))

    manifest = object_of("agent/manifest.json", "agent/manifest.json")
    if hashlib.sha256(manifest).hexdigest() != manifest_sha256:
        raise Stuck("the store's agent/manifest.json is not the one of this user data; `fleetctl request` it again")
    wheels = json.loads(manifest)["files"]
    for wheel in wheels:
        if not re.fullmatch(r"[A-Za-z0-9_.+!]+(-[A-Za-z0-9_.+!]+)*-none-any\.whl", wheel["name"]):
            raise Stuck("{!r} in the manifest is no wheel that suits every machine".format(wheel["name"]))

    def one(wheel: dict[str, Any]) -> tuple[str, bytes]:
        name = wheel["name"]
        body = object_of("wheel " + name, "agent/wheels/" + name)
        if hashlib.sha256(body).hexdigest() != wheel["sha256"]:
            raise Stuck(f"the store's wheel {name} is not the one in the manifest (sha256 differs)")
        return name, body

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return dict(pool.map(one, wheels))


def unzip(name: str, content: bytes, folder: str, prefixes: tuple[str, ...] = ("",)) -> None:
    """The wheel's files below `folder`; only those whose path begins with one of `only`."""
    with zipfile.ZipFile(io.BytesIO(content)) as wheel:
        for item in wheel.infolist():
            parts = item.filename.split("/")
            if item.filename.startswith("/") or ".." in parts or "\\" in item.filename:
                raise Stuck(f"the wheel {name} has a path out of its folder: {item.filename!r}")
            if item.filename.startswith(prefixes) and not parts[0].endswith(".data"):
                wheel.extract(item, folder)


def install(aws: Aws, manifest_sha256: str) -> None:
    """The agent's own environment and the trainer's copy of our packages, each whole or not at all."""
    marks = [HOME + "/agent/.manifest", HOME + "/trainer/.manifest"]
    if all(read(mark) == manifest_sha256 for mark in marks) and os.access(AGENT_PYTHON, os.X_OK):
        return say("the agent is installed already")
    start = time.monotonic()
    wheels = fetch(aws, manifest_sha256)
    new = f"{HOME}/.new-{os.getpid()}"
    try:
        # A virtual environment by hand (PEP 405): images without the venv module's parts do, and it takes no time.
        python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
        site = new + SITE
        for folder in (new + "/agent/bin", site, new + "/trainer"):
            os.makedirs(folder)
        os.symlink(python, new + "/agent/bin/python")
        with open(new + "/agent/pyvenv.cfg", "w", encoding="utf-8") as file:
            file.write(f"home = {os.path.dirname(python)}\ninclude-system-site-packages = false\n")
        for name, content in wheels.items():
            unzip(name, content, site)
            if name.startswith("spotheal-"):
                unzip(name, content, new + "/trainer", ("spotheal/agent/", "spotheal/training/"))
        for part in ("agent", "trainer"):
            with open(f"{new}/{part}/.manifest", "w", encoding="utf-8") as file:
                file.write(manifest_sha256)
            if os.path.lexists(HOME + "/" + part):
                os.rename(HOME + "/" + part, f"{new}/old-{part}")
            os.rename(new + "/" + part, HOME + "/" + part)
    except (OSError, zipfile.BadZipFile) as error:
        raise Stuck(f"the agent cannot be unpacked below {HOME}: {error}") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)
    say(f"the agent is installed, {len(wheels)} wheels in {time.monotonic() - start:.1f} s")


# --------------------------------------------------------------------------------------------------------------- start
def since_user_data() -> str:
    """Seconds since the shell that runs the user data began: our parent; systemd has none after a reboot."""
    try:
        shell = os.getppid() if os.getppid() != 1 else os.getpid()
        with open(f"/proc/{shell}/stat", encoding="ascii", errors="replace") as stat, open("/proc/uptime") as uptime:
            start = int(stat.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
            return f", {float(uptime.read().split()[0]) - start:.1f} s after the user data began"
    except (OSError, ValueError, IndexError):
        return ""


def go_on_after_reboot(manifest_sha256: str) -> None:
    """Before anything is waited for. Without it this boot goes on all the same."""
    if ROOT or os.getuid() != 0 or not os.path.isdir("/run/systemd/system"):
        return
    try:
        with open(UNITS + "spotheal-install.service", "w", encoding="utf-8") as file:
            file.write(INSTALL_UNIT.format(home=HOME, python=sys.executable, manifest=manifest_sha256))
        subprocess.run(["systemctl", "enable", "spotheal-install.service"], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        say(f"a reboot before the agent is installed would end it: {error}")


def start(manifest_sha256: str) -> None:
    """What else there is to do is installed by now (start.py): it says in one line how that went."""
    argv = [AGENT_PYTHON, "-I", "-m", "spotheal.userdata.start", manifest_sha256]
    process = subprocess.run(argv, stdout=subprocess.PIPE, text=True)
    output = process.stdout.strip()
    if process.returncode != 0:
        raise Stuck(output or f"the installed agent's start ended with {process.returncode}")
    say(output + since_user_data())


def main() -> int:
    os.umask(0o022)
    version = sys.version.split()[0]
    say(f"user data, Python {version}, {sys.executable}")
    config = configuration()
    if not any(sys.argv[2:]):
        go_on_after_reboot(sys.argv[1])
    metadata = Metadata()
    aws = Aws(config["run"]["region"], config["run"]["store"], metadata)
    instance: dict[str, Any] = {}
    try:
        instance = patiently("read who this instance is", metadata.instance)
        count_launch(aws, config, instance, "booting")
        if any(sys.argv[2:]):
            raise Stuck(sys.argv[2])
        if sys.version_info < PYTHON_MIN:
            raise Stuck(f"no Python 3.10 or newer on this image: the best is {sys.executable}, {version}. {ADVICE}")
        install(aws, sys.argv[1])
        start(sys.argv[1])
        return 0
    except (Stuck, KeyError, ValueError, OSError) as error:  # what else there may be, stub.sh reports
        reason = str(error) if isinstance(error, Stuck) else f"{type(error).__name__}: {error}"
    say(f"this machine cannot start the job: {reason}", failed=True)
    if instance:
        record_failure(aws, config, instance, reason)
    return REPORTED


if __name__ == "__main__":
    sys.exit(main())
