"""Tries the agent that bootstrap.py has installed, and starts it. Standard library only; runs in the agent's Python.

    python -m spotheal.userdata.start MANIFEST_SHA256        once: on standard output one line, what happened; exit code
                                                             1 and why, if the agent cannot run here
    python -m spotheal.userdata.start keep MANIFEST_SHA256   run the agent, again whenever it ends with anything but 0
    python -m spotheal.userdata.start ended                  systemd has ended the agent: count it if it never got ready

It comes with the wheels and not in the user data, which has no room for what is needed only after they are unpacked.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = os.environ.get("SPOTHEAL_ROOT", "").rstrip("/")
HOME = ROOT + "/opt/spotheal"
LOG = ROOT + "/var/log/spotheal/user-data.log"
AGENT = [HOME + "/agent/bin/python", "-I", "-m", "spotheal.agent"]
RUN = [*AGENT, "run", "--config", HOME + "/config.json"]
CHECK = [*AGENT, "check", "--config", HOME + "/config.json"]
UNITS = "/etc/systemd/system/"
NEEDRESTART = "/etc/needrestart/conf.d/"
DEBIAN = "/etc/debian_version"
# Passed on to the agent where systemd starts it.
ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_EC2_METADATA_SERVICE_ENDPOINT", "AWS_CA_BUNDLE")
PROXIES = ("http_proxy", "https_proxy", "no_proxy")
RESTART_SECONDS_MAX = 10.0
RUNNING_SECONDS = 30.0  # how long systemd is asked whether the agent runs, to say it here
# An agent that ends this often within this time never gets to work, and is a boot that failed. More than the ten starts
# after which an agent that does get to work parks the run itself (agent/life/finish.py).
STARTS_MAX, STARTS_SECONDS = 15, 300.0
CANNOT_STAY_UP = f"the agent ended {STARTS_MAX} times within {STARTS_SECONDS:.0f} s"
# So is one that ends this often in a row before it is ready, or hangs there (TimeoutStartSec each), however long that
# takes: on a busy machine a start takes more than 20 s, and 15 more than 300 s.
HANGS_MAX = 2
HUNG = f"the agent hung {HANGS_MAX} times before it was ready"
# Without systemd nothing says that it is ready: a life this short is one in which it did not get to work.
SHORT_SECONDS = 60.0
ENDS_EARLY = f"the agent ended {STARTS_MAX} times in a row, each within {SHORT_SECONDS:.0f} s"
NEVER_READY = f"the agent ended {STARTS_MAX} times before it was ready"
RUN_FOLDER = ROOT + "/run/spotheal"
# Counts that boot and switches the machine off. If it cannot be counted, the agent is started again. `ended` starts it:
# systemd's own start limit with OnFailure cannot tell such an agent from one that a person stopped and that ended with
# an error (its Result stays "exit-code" in systemd 252).
FAILED_UNIT = """[Unit]
Description=spotheal: counts an agent that cannot stay up as a boot that failed

[Service]
Type=oneshot
EnvironmentFile=-/opt/spotheal/environment
ExecStart=-systemctl stop spotheal-agent.service
ExecStart=-/bin/sh -c 'exec {python} -EsB {home}/bootstrap.py {manifest} \
"$$(cat {run}/failed); it last said: \
$$(journalctl _SYSTEMD_UNIT=spotheal-agent.service -n 1 -o cat)"'
ExecStart=-/bin/rm -f {run}/failed
ExecStart=systemctl reset-failed spotheal-agent.service
ExecStart=systemctl start --no-block spotheal-agent.service
StandardOutput=journal+console
StandardError=journal+console
# Nothing that needs a mount of its own: on a full disk systemd could not make it, and the failure would not be counted.
NoNewPrivileges=yes
RestrictNamespaces=yes
RestrictSUIDSGID=yes
RestrictRealtime=yes
LockPersonality=yes
SystemCallArchitectures=native
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
CapabilityBoundingSet=~CAP_SYS_TIME CAP_WAKE_ALARM CAP_BLOCK_SUSPEND CAP_SYS_PACCT CAP_SYS_TTY_CONFIG CAP_LEASE
CapabilityBoundingSet=~CAP_LINUX_IMMUTABLE CAP_SYS_RAWIO CAP_MAC_ADMIN CAP_MAC_OVERRIDE CAP_SYSLOG CAP_BPF
CapabilityBoundingSet=~CAP_SYS_MODULE CAP_MKNOD CAP_NET_ADMIN CAP_NET_RAW CAP_NET_BIND_SERVICE CAP_NET_BROADCAST
CapabilityBoundingSet=~CAP_IPC_LOCK CAP_SYS_PTRACE CAP_SYS_CHROOT CAP_SYS_NICE CAP_SYS_RESOURCE CAP_SETFCAP
"""


class CannotStart(Exception):
    """The text says why in one line."""


def say(text: str) -> None:
    line = f"spotheal: {text}\n"
    sys.stderr.write(line)
    try:
        with open(LOG, "a", encoding="utf-8") as file:
            file.write(line)
    except OSError:
        pass


def check() -> None:
    """An agent that cannot be imported here, or refuses its configuration, would be started again for ever."""
    process = subprocess.run(CHECK, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if process.returncode != 0:
        error = process.stderr.strip() or f"it ended with {process.returncode}"
        raise CannotStart("the agent cannot run here: " + error.split("\n")[-1])


def make_user(cage: dict[str, str]) -> None:
    """The trainer's user: no login, no rights. Only where the whole machine is ours."""
    if ROOT or os.getuid() != 0 or cage["mode"] == "off":
        return
    try:
        pwd.getpwnam(cage["user"])
    except KeyError:
        argv = ["useradd", "--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent"]
        argv += ["--shell", "/usr/sbin/nologin", cage["user"]]
        try:
            subprocess.run(argv, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            cause = (getattr(error, "stderr", "") or str(error)).strip()
            raise CannotStart(f"the trainer's user {cage['user']} cannot be made: {cause}") from None


# ------------------------------------------------------------------------------------------------------------- systemd
def has_systemd() -> bool:
    """Whether systemd runs here and the machine is ours."""
    return not ROOT and os.getuid() == 0 and os.path.isdir("/run/systemd/system")


def systemctl(*argv: str) -> str:
    process = subprocess.run(["systemctl", *argv], capture_output=True, text=True)
    if process.returncode != 0:
        raise CannotStart(f"systemctl {argv[0]} failed: {process.stderr.strip()}")
    return process.stdout.strip()


def mount_unit(path: str) -> str:
    """systemd's name of the unit of what is mounted at `path` (systemd-escape --path --suffix=mount)."""
    joined = "/".join(part for part in path.split("/") if part not in ("", "."))
    plain = "".join(c if c.isalnum() or c in ":_./" else f"\\x{ord(c):02x}" for c in joined)
    return ("\\x2e" + plain[1:] if plain.startswith(".") else plain).replace("/", "-") + ".mount"


def write_units(config: dict[str, Any], manifest_sha256: str) -> None:
    shutil.copyfile(Path(__file__).with_name("spotheal-agent.service"), UNITS + "spotheal-agent.service")
    # At shutdown systemd unmounts all it sees mounted. Between two saves it would find the volume idle, and the last
    # checkpoint would go to the folder below: the mount has to wait for the agent.
    os.makedirs(UNITS + "spotheal-agent.service.d", exist_ok=True)
    _write(UNITS + "spotheal-agent.service.d/volume.conf", f"[Unit]\nAfter={mount_unit(config['volume']['mount'])}\n")
    values = {"python": sys.executable, "home": HOME, "run": RUN_FOLDER}
    failed = FAILED_UNIT.format(manifest=manifest_sha256, **values)
    _write(UNITS + "spotheal-failed.service", failed)
    lines = [f'{name}="{value}"\n' for name, value in os.environ.items() if _is_passed_on(name)]
    _write(HOME + "/environment", "".join(lines))


def _is_passed_on(name: str) -> bool:
    return name.startswith("AWS_ENDPOINT_URL_") or name in ENDPOINTS or name.lower() in PROXIES


def keep_from_needrestart() -> None:
    """Ubuntu's needrestart restarts each service whose libraries were upgraded, unattended upgrades included: the
    trainer would lose its machine's time for a handover, or its steps since the last save.

    https://discourse.ubuntu.com/t/needrestart-changes-in-ubuntu-24-04-service-restarts/44671
    """
    if not os.path.isdir(os.path.dirname(NEEDRESTART.rstrip("/"))) and not os.path.exists(DEBIAN):
        return
    try:
        os.makedirs(NEEDRESTART, exist_ok=True)
        _write(NEEDRESTART + "spotheal.conf", "$nrconf{override_rc}{qr(^spotheal-)} = 0;\n")
    except OSError as error:
        say(f"an upgrade of this machine's packages may restart the agent: {error}")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def start(config: dict[str, Any], manifest_sha256: str) -> str:
    """Under systemd where it runs and the machine is ours, else as a process of its own that is started again.

    Returns what came of it.
    """
    if not has_systemd():
        argv = [sys.executable, "-I", "-m", "spotheal.userdata.start", "keep", manifest_sha256]
        folder = ROOT or "/"
        subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True, cwd=folder)
        return "the agent is started"
    write_units(config, manifest_sha256)
    keep_from_needrestart()
    systemctl("daemon-reload")
    systemctl("enable", "--now", "--no-block", "spotheal-agent.service")
    limit, state = time.monotonic() + RUNNING_SECONDS, ""
    while time.monotonic() < limit and state != "active":
        time.sleep(0.05)
        state = systemctl("show", "--property=ActiveState", "--value", "spotheal-agent.service")
    if state == "active":
        return "the agent runs"
    return f"the agent is not up after {RUNNING_SECONDS:.0f} s ({state}): `systemctl status spotheal-agent`"


def ended() -> int:
    """After each end of the agent (ExecStopPost): an agent that cannot stay up, or never gets ready, is counted.

    Orderly ends do not count, nor does a stop that took too long, which systemd names "timeout" as well as a hang.
    """
    result = os.environ.get("SERVICE_RESULT", "success")
    is_ready = not os.path.exists(RUN_FOLDER + "/starting")
    if result == "success" or (is_ready and result == "timeout"):
        return 0
    hangs = _one_more("hangs", result == "timeout")
    early = _one_more("early", not is_ready and result != "timeout")
    now = time.monotonic()
    times = [*_times(), now][-STARTS_MAX:]
    _write(RUN_FOLDER + "/ends", " ".join(map(str, times)))
    if hangs >= HANGS_MAX:
        reason = HUNG
    elif early >= STARTS_MAX:
        reason = NEVER_READY
    elif len(times) == STARTS_MAX and now - times[0] <= STARTS_SECONDS:
        reason = CANNOT_STAY_UP
    else:
        return 0
    for name in ("hangs", "early", "ends"):
        _write(f"{RUN_FOLDER}/{name}", "")
    _write(RUN_FOLDER + "/failed", reason)
    systemctl("start", "--no-block", "spotheal-failed.service")
    return 0


def _one_more(name: str, counts: bool) -> int:
    """A number that is the size of a file, which the unit removes when the agent is ready."""
    path = f"{RUN_FOLDER}/{name}"
    number = (os.path.getsize(path) if os.path.exists(path) else 0) + counts
    if counts:
        _write(path, "x" * number)
    return number


def _times() -> list[float]:
    """When the agent failed, by the machine's monotonic clock."""
    try:
        with open(RUN_FOLDER + "/ends", encoding="ascii") as file:
            return [float(word) for word in file.read().split()]
    except FileNotFoundError:
        return []


# ------------------------------------------------------------------------------------------------------ without systemd
def keep(manifest_sha256: str) -> int:
    """Run the agent until it ends with 0 or we are asked to end; one keeper a machine."""
    os.makedirs(ROOT + "/run/spotheal", exist_ok=True)
    lock = open(ROOT + "/run/spotheal/keeper.lock", "w", encoding="ascii")  # noqa: SIM115 (held for life)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        say("the agent runs already")
        return 0
    agent: subprocess.Popen[bytes] | None = None
    is_stopping = False

    def end(*_: object) -> None:
        nonlocal is_stopping
        is_stopping = True
        if agent is None or agent.poll() is not None:
            sys.exit(0)
        agent.terminate()

    signal.signal(signal.SIGTERM, end)
    pause = 0.5
    short = 0  # lives in a row; there is no `starting` here, which would tell an agent that was never ready
    while True:
        start = time.monotonic()
        agent = subprocess.Popen(RUN, stdin=subprocess.DEVNULL)
        if is_stopping:
            agent.terminate()
        code = agent.wait()
        if code == 0 or is_stopping:
            return 0
        is_short = time.monotonic() - start <= SHORT_SECONDS
        short = short + 1 if is_short else 0
        if short >= STARTS_MAX:
            reason = f"{ENDS_EARLY}, the last time with {code}"
            subprocess.run([sys.executable, "-EsB", HOME + "/bootstrap.py", manifest_sha256, reason], cwd=ROOT or "/")
            short = 0  # it could not be counted, else this machine would be off
        pause = min(2 * pause, RESTART_SECONDS_MAX) if is_short else 1.0
        say(f"the agent ended with {code}; it is started again in {pause:.0f} s")
        time.sleep(pause)


def main() -> int:
    if sys.argv[1] == "keep":
        return keep(sys.argv[2])
    if sys.argv[1] == "ended":
        return ended()
    with open(HOME + "/config.json", encoding="utf-8") as file:
        config = json.load(file)
    try:
        check()
        make_user(config["cage"])
        print(start(config, sys.argv[1]))
        return 0
    except (CannotStart, OSError) as error:
        print(error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
