"""The trainer's cage, with real users, namespaces and mounts: what is inside can do nothing to what is outside."""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog

from spotheal.agent.cage import cage as cages
from spotheal.agent.cage import network
from spotheal.agent.cage.cage import Cage, enclose
from spotheal.agent.cage.user import cage_account
from spotheal.agent.files.folders import Folders
from spotheal.agent.files.paths import Paths
from spotheal.agent.processes import group as process_group
from spotheal.agent.processes import programs
from spotheal.agent.processes.account import Account
from spotheal.agent.processes.group import ForeignProgram, end_all_of, owned_by
from spotheal.agent.processes.sandbox import Sandbox
from spotheal.agent.protocol.clock import SystemClock
from spotheal.agent.protocol.errors import Fatal, SetupFailed
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job import parse_job
from spotheal.agent.protocol.names import StoreUrl

USER = "spotheal-test-c"
CLOCK, LOG = SystemClock(), structlog.get_logger()
root_only = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("useradd") is None, reason="needs root and useradd: users, namespaces, mounts"
)
pytestmark = [pytest.mark.root, pytest.mark.processes]


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that is not below /tmp, which the cage has a private one of."""
    folder = Path(tempfile.mkdtemp(prefix="spotheal-test-", dir="/var/lib"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def user() -> Iterator[str]:
    yield USER
    subprocess.run(["userdel", USER], capture_output=True, check=False)


@pytest.fixture
def account(place: Path, user: str) -> Iterator[Account]:
    etc = place / "etc"
    etc.mkdir()
    for name in ("work", "home"):
        (place / name).mkdir()
    sandbox = Sandbox((place / "work", place / "home"), place / "scratch", hidden=(str(place / "hidden"),))
    found = cage_account(user, place / "home", sandbox, etc)
    for name in ("work", "home"):
        os.chown(place / name, found.uid, found.gid)
    yield found
    end_all_of(found, CLOCK)


def run(account: Account, place: Path, script: str, *, mark: bool = False, seconds: float = 20) -> str:
    """Output of a shell script in the cage; with `mark` it counts as the trainer."""
    lines: list[str] = []
    ended = threading.Event()
    program = ForeignProgram(
        ["/bin/sh", "-c", script],
        directory=place / "work",
        environment={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": account.home, "MARK": str(place)},
        account=account,
        on_line=lines.append,
        on_end=ended.set,
        mark="MARK" if mark else "",
    )
    ended.wait(seconds)
    program.end_all(CLOCK)
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------- the user
@root_only
def test_the_user_has_no_login_no_home_and_no_group_of_another(account: Account) -> None:
    entry = pwd.getpwnam(account.name)
    assert (entry.pw_shell, entry.pw_dir) == ("/usr/sbin/nologin", "/nonexistent")
    assert entry.pw_uid < 1000
    shadow = next(line for line in Path("/etc/shadow").read_text().splitlines() if line.startswith(account.name + ":"))
    assert shadow.split(":")[1].startswith("!")
    assert os.getgrouplist(account.name, entry.pw_gid) == [entry.pw_gid]


@root_only
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"cron.deny": "mallory", "at.deny": ""}, {"cron.deny": f"mallory\n{USER}\n", "at.deny": f"{USER}\n"}),
        ({"cron.allow": "root", "cron.deny": ""}, {"cron.deny": ""}),
        ({"debian_version": "12"}, {"cron.deny": f"{USER}\n"}),
        ({}, {}),
    ],
    ids=["both", "allow lists stand", "open on Debian", "closed elsewhere"],
)
def test_cron_and_at_are_closed_to_the_user_and_opened_to_nobody(
    before: dict[str, str], after: dict[str, str], place: Path, user: str
) -> None:
    for name, text in before.items():
        (place / name).write_text(text)
    for _ in range(2):
        cage_account(user, place, Sandbox((), place), place)
    now = {path.name: path.read_text() for path in place.iterdir() if path.suffix == ".deny"}
    assert now == after


@root_only
@pytest.mark.parametrize("name", ["root", "person"])
def test_a_persons_account_is_refused_for_the_cage_kills_all_its_processes(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {"root": (0, "/bin/bash"), "person": (1000, "/bin/bash")}
    uid, shell = entries[name]
    entry = pwd.struct_passwd((name, "x", uid, uid, "", "/home/x", shell))
    monkeypatch.setattr(pwd, "getpwnam", lambda user: entry)
    with pytest.raises(SetupFailed, match="kills every process") as caught:
        cage_account(name, place, Sandbox((), place), place)
    assert "user" in caught.value.next_step


# ---------------------------------------------------------------------------------------------------------- the sandbox
@pytest.fixture
def inheritable() -> Iterator[None]:
    """All our capabilities are inheritable, as those of each service are under systemd 262 in a container."""
    libc, header, old = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, old) == 0
    low, low_permitted, _, high, high_permitted, _ = old
    full = (ctypes.c_uint32 * 6)(low, low_permitted, low_permitted, high, high_permitted, high_permitted)
    assert libc.capset(header, full) == 0
    yield
    assert libc.capset(header, old) == 0


@root_only
@pytest.mark.usefixtures("inheritable")
def test_only_its_own_folders_are_writable_and_no_program_gives_rights(account: Account, place: Path) -> None:
    (place / "open").mkdir()
    (place / "open").chmod(0o777)
    (place / "hidden").mkdir()
    (place / "hidden/secret").write_text("canary")
    script = f"""
    id -u; id -G
    for folder in {place}/work {place}/home /tmp /var/tmp /dev/shm; do touch $folder/caged && echo writes $folder; done
    for folder in {place} {place}/open /etc /usr /var/lib /run; do touch $folder/x 2>&1; done
    ls /tmp /dev/shm | tr '\\n' ' '
    cat {place}/hidden/secret 2>&1; ls {place}/hidden 2>&1
    grep -E '^(NoNewPrivs|CapEff|CapPrm|CapInh|CapBnd|CapAmb)' /proc/self/status
    mount -t tmpfs none {place}/work 2>&1 | tail -1
    """
    said = run(account, place, script)
    lines = said.splitlines()
    assert lines[0] == str(account.uid)
    assert set(lines[1].split()) == {str(group) for group in (account.gid, *account.groups)}
    assert [line for line in lines if line.startswith("writes")] == [
        f"writes {folder}" for folder in (place / "work", place / "home", "/tmp", "/var/tmp", "/dev/shm")
    ]
    assert said.count("Read-only file system") >= 2, said  # of {place}/open at least: rights alone would allow it
    assert f"cannot touch '{place}/open/x': Read-only file system" in said
    assert "canary" not in said
    assert "NoNewPrivs:\t1" in said
    assert [line.split()[1].strip("0") for line in lines if line.startswith("Cap")] == [""] * 5
    assert not any((Path(folder) / "caged").exists() for folder in ("/tmp", "/var/tmp", "/dev/shm"))
    assert "must be superuser" in said or "permission denied" in said.lower()


@root_only
def test_of_run_only_what_is_kept_is_seen_and_a_folder_of_the_trainers_is_writable(
    account: Account, place: Path
) -> None:
    run_folder = Path(tempfile.mkdtemp(prefix="spotheal-test-", dir="/run"))
    run_folder.chmod(0o755)
    try:
        for name in ("kept", "own", "other"):
            (run_folder / name).mkdir()
            (run_folder / name / "file").write_text(name)
        (run_folder / "single").write_text("single")
        os.chown(run_folder / "own", account.uid, account.gid)
        kept = (str(run_folder / "kept"), str(run_folder / "single"))
        sandbox = Sandbox((place / "work", run_folder / "own"), place / "scratch", kept=kept)
        caged = Account(account.name, account.uid, account.gid, (), account.home, sandbox)
        said = run(caged, place, f"cd {run_folder}; echo *; cat */file single; echo; touch own/new kept/new 2>&1")
        assert said.splitlines()[:2] == ["kept own single", "keptownsingle"]
        assert "cannot touch 'kept/new': Read-only file system" in said
        assert (run_folder / "own/new").exists()
    finally:
        shutil.rmtree(run_folder)


@root_only
@pytest.mark.parametrize(("limits_calls", "filters"), [(True, "2"), (False, "0")])
def test_a_filter_of_system_calls_stands_unless_they_are_open(
    limits_calls: bool, filters: str, account: Account, place: Path
) -> None:
    sandbox = Sandbox((place / "work",), place / "scratch", limits_calls=limits_calls)
    caged = Account(account.name, account.uid, account.gid, (), account.home, sandbox)
    assert run(caged, place, "grep '^Seccomp:' /proc/self/status | cut -f 2") == filters


@root_only
def test_the_machine_keeps_its_mounts_and_its_mode_while_a_cage_stands(account: Account, place: Path) -> None:
    before = Path("/proc/self/mounts").read_text()
    run(account, place, "true")
    assert Path("/proc/self/mounts").read_text() == before
    (place / "still-writable").touch()


@root_only
def test_a_program_that_is_not_there_is_told_from_a_cage_that_cannot_be(account: Account, place: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ForeignProgram(
            ["no-such-program"], directory=place / "work", environment={"PATH": "/bin"}, account=account,
            on_line=lambda line: None,
        )  # fmt: skip
    broken = Account(account.name, account.uid, account.gid, (), account.home, _Broken((), place / "scratch"))
    with pytest.raises(SetupFailed, match="cage could not be made"):
        run(broken, place, "echo never")


class _Broken(Sandbox):
    def to_orders(self) -> dict[str, Any]:
        return super().to_orders() | {"temporary": [["/tmp", "/nonexistent-folder"]]}


@root_only
def test_a_link_that_a_trainer_left_in_place_of_its_folder_opens_no_other(account: Account, place: Path) -> None:
    """Below a volume's top that all may write: such a link to /run/dbus showed it the message bus."""
    hidden, work = Path(f"/run/spotheal-test-{os.getpid()}"), place / "work"
    hidden.mkdir()
    hidden.chmod(0o777)
    try:
        (work / "results").symlink_to(hidden)
        os.lchown(work / "results", account.uid, account.gid)
        linked = replace(account, sandbox=replace(account.sandbox, writable=(work, work / "results")))
        assert run(linked, place, f"touch {hidden}/x 2>&1; ls /run/ | grep -c spotheal-test").endswith("\n0")
        assert list(hidden.iterdir()) == []
    finally:
        shutil.rmtree(hidden)


# ------------------------------------------------------------------------------------------------------------- its end
HIDE = """
setsid sh -c '(trap "" TERM HUP; env -i setsid sleep 300 & ) ; exec env -i sleep 300' </dev/null >/dev/null 2>&1 &
(env -i nohup sleep 300 </dev/null >/dev/null 2>&1 &)
(while :; do env -i sleep 0.01; done </dev/null >/dev/null 2>&1 &)
while ! test -e seen; do sleep 0.05; done
"""


def see_four(account: Account, place: Path) -> None:
    """Let the script go on once four of its processes run at the same time."""
    until = time.monotonic() + 20
    while len(owned_by(account.uid)) < 5 and time.monotonic() < until:
        time.sleep(0.05)
    (place / "work/seen").touch()


@root_only
def test_no_grandchild_outlives_the_trainer_whatever_it_does_to_hide(account: Account, place: Path) -> None:
    watch = threading.Thread(target=see_four, args=(account, place))
    watch.start()
    run(account, place, HIDE, mark=True, seconds=40)
    watch.join()
    assert (place / "work/seen").exists()
    assert owned_by(account.uid) == set()


# Waits for whoever is about to kill it, and stops that at the moment at which it is of its own user.
STOPS_ITS_KILLER = """
import os, signal
def killers():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if b"os.kill(-1, 9)" in file.read():
                    yield int(pid)
        except OSError:
            continue
open("seen", "w").close()
while True:
    for pid in killers():
        while True:
            try:
                os.kill(pid, signal.SIGSTOP)
                open("stopped", "w").close()
            except PermissionError:
                continue
            except ProcessLookupError:
                pass
            break
"""


@root_only
def test_no_process_of_the_trainer_stops_the_one_that_kills_it(account: Account, place: Path) -> None:
    (place / "work/stops.py").write_text(STOPS_ITS_KILLER)
    start = "for n in 1 2; do setsid /usr/bin/python3 stops.py & done; until test -e seen; do sleep 0.05; done"
    for _ in range(3):
        run(account, place, start, mark=True)
        assert not (place / "work/stopped").exists()
        assert owned_by(account.uid) == set()


@root_only
def test_what_a_git_or_a_setup_command_left_behind_ends_with_the_cage(account: Account, place: Path) -> None:
    (place / "work/seen").touch()
    run(account, place, HIDE)
    assert end_all_of(account, CLOCK) == []
    assert owned_by(account.uid) == set()


@root_only
def test_what_another_program_started_as_the_user_ends_with_the_trainer_too(account: Account, place: Path) -> None:
    """As cron or a service of the machine would: no group, session or variable of the run's."""
    for ends in (lambda: run(account, place, "true", mark=True), lambda: end_all_of(account, CLOCK)):
        sleeper = subprocess.Popen(["sleep", "60"], user=account.uid, group=account.gid, extra_groups=[], env={})
        try:
            assert owned_by(account.uid) == {sleeper.pid}
            ends()
            assert owned_by(account.uid) == set()
        finally:
            sleeper.kill()
            sleeper.wait()


@root_only
def test_without_a_sandbox_the_processes_of_an_account_are_never_swept(account: Account) -> None:
    person = Account(account.name, account.uid, account.gid, (), account.home)
    sleeper = subprocess.Popen(["sleep", "60"], user=account.uid, group=account.gid, extra_groups=[])
    try:
        assert end_all_of(person, CLOCK) == []
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


@root_only
@pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="needs mkfs.ext4")
def test_a_cage_does_not_keep_the_volume_busy(account: Account, place: Path) -> None:
    """Also one that still runs: below a shared mount, as systemd makes the root, unmounting reaches it."""
    image, volume = place / "disk", place / "volume"
    volume.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    device = subprocess.run(
        ["losetup", "--find", "--show", str(image)], check=True, capture_output=True, text=True
    ).stdout.strip()
    folders = (place / "work", volume, volume / "results")  # which is writable by name, too
    mounted = Account(account.name, account.uid, account.gid, (), account.home, Sandbox(folders, place / "scratch"))
    try:
        subprocess.run(["mount", "--bind", str(place), str(place)], check=True)
        subprocess.run(["mount", "--make-shared", str(place)], check=True)
        subprocess.run(["mount", device, str(volume)], check=True)
        volume.chmod(0o777)
        (volume / "results").mkdir()
        lines: list[str] = []
        program = ForeignProgram(
            ["/bin/sh", "-c", f"echo kept >{volume}/file; echo wrote; sleep 60"],
            directory=place / "work",
            environment={"PATH": "/usr/bin:/bin"},
            account=mounted,
            on_line=lines.append,
        )
        until = time.monotonic() + 20
        while not lines and time.monotonic() < until:
            time.sleep(0.02)
        assert (volume / "file").read_text() == "kept\n"
        subprocess.run(["umount", str(volume)], check=True)
        assert device not in Path(f"/proc/{program.pid}/mounts").read_text()
        subprocess.run(["fsck.ext4", "-fn", device], check=True, capture_output=True)
        assert program.end_all(CLOCK) == []
    finally:
        for folder in (volume, place):
            subprocess.run(["umount", str(folder)], capture_output=True, check=False)
        subprocess.run(["losetup", "--detach", device], check=True)


# ------------------------------------------------------------------------------------------------------------- enclose
def configured(mode: str, user: str = USER) -> InstanceConfig:
    document: dict[str, Any] = {"job": {"name": "j", "repository": "https://example.org/r", "command": ["x"]}}
    document["cage"] = {"mode": mode, "user": user}
    return InstanceConfig(parse_job(document), "run", "us-west-2", StoreUrl("b", "j/run"), "0" * 40)


def enclosed(mode: str, root: Path) -> Cage:
    return enclose(configured(mode), Paths(root), Folders.at(root, "/mnt"), CLOCK, LOG, ask=lambda path: None)


def test_below_another_root_there_is_a_relay_and_no_user_no_sandbox_no_rule(place: Path) -> None:
    found = enclosed("on", place)
    try:
        assert found.relay is not None
        assert found.environment == {"AWS_EC2_METADATA_SERVICE_ENDPOINT": found.relay.url}
        assert found.account is None or found.account.sandbox is None
    finally:
        found.leave(CLOCK)


def test_rules_that_somebody_took_away_are_made_again_until_the_cage_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """`systemctl reload nftables` begins with `flush ruleset`."""
    table: list[str] = []
    monkeypatch.setattr(cages, "open_imds", lambda log: table.clear())
    cage = Cage(None, LOG, _redirect=lambda: table.append("closed"))
    table.clear()
    cage.keep_closed()
    assert table == ["closed"]
    cage.leave(CLOCK)
    cage.keep_closed()
    assert table == []


def test_nftables_is_installed_from_lists_that_were_fetched_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image with empty lists of packages could not be caged, and set-up failed."""
    ran: list[str] = []

    def run(argv: list[str], seconds_max: float) -> programs.Result:
        ran.append(" ".join(argv))
        return programs.Result(0, "", "")

    def find(name: str) -> str:
        if not any("install" in order for order in ran):
            raise Fatal(f"{name} is missing")
        return f"/usr/sbin/{name}"

    for name, fake in (("run", run), ("find", find), ("exists", lambda name: name == "apt-get")):
        monkeypatch.setattr(programs, name, fake)
    network._find_nft(LOG)
    assert ["apt-get update", "apt-get -o"] == [" ".join(order.split()[:2]) for order in ran]
    assert ran[1].endswith("install --yes --no-install-recommends nftables")


class WholeMachine(Paths):
    """Below a folder all the same."""

    @property
    def is_whole_machine(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("mode", "limits_calls", "relay"), [("on", True, True), ("calls", False, True), ("imds", True, False)]
)
def test_each_mode_opens_one_thing(
    mode: str, limits_calls: bool, relay: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cages, "_refuse_without_root", lambda: None)
    account = partial(Account, uid=54321, gid=54321, groups=(), home="/")
    monkeypatch.setattr(cages, "cage_account", lambda user, home, sandbox: account(user, sandbox=sandbox))
    monkeypatch.setattr(cages, "end_all_of", lambda account, clock: [])
    monkeypatch.setattr(cages, "close_imds", lambda uid, port, log, endpoint: None)
    monkeypatch.setattr(cages, "open_imds", lambda log: None)
    cage = enclose(configured(mode), WholeMachine(place), Folders.at(place, "/mnt"), CLOCK, LOG, ask=lambda path: None)
    assert cage.account is not None and cage.account.sandbox is not None
    assert (cage.account.sandbox.limits_calls, cage.relay is not None) == (limits_calls, relay)
    cage.leave(CLOCK)


@pytest.mark.parametrize("mode", ["imds", "off"])
def test_the_other_modes_have_no_relay(mode: str, place: Path) -> None:
    assert enclosed(mode, place).relay is None


def test_without_root_a_cage_on_a_whole_machine_is_refused_and_not_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cages.os, "geteuid", lambda: 1000)
    for mode in ("on", "calls", "imds"):
        with pytest.raises(SetupFailed, match="needs Linux and an agent that runs as root") as caught:
            enclosed(mode, Path("/"))
        assert 'mode = "off"' in caught.value.next_step


def test_the_sweep_is_never_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[object] = []
    monkeypatch.setattr(process_group.subprocess, "run", lambda *a, **k: killed.append(a))
    assert end_all_of(Account("root", 0, 0, (), "/", Sandbox((), Path("/x"))), CLOCK) == []
    assert killed == []
    assert signal.SIGKILL == 9


# ------------------------------------------------------------------------------------------------- memory and processes
@root_only
def test_where_memory_ends_what_is_in_the_cage_is_killed_first(account: Account, place: Path) -> None:
    assert int(run(account, place, "cat /proc/self/oom_score_adj")) > int(Path("/proc/self/oom_score_adj").read_text())


@root_only
def test_a_machine_without_a_free_process_ends_the_cages_nevertheless(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_fork(*_: Any, **__: Any) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    sleepers = [subprocess.Popen(["sleep", "60"], user=account.uid, group=account.gid, extra_groups=[]) for _ in "12"]
    monkeypatch.setattr(process_group.subprocess, "run", no_fork)
    assert end_all_of(account, CLOCK) == []
    assert [sleeper.wait(5) for sleeper in sleepers] == [-signal.SIGKILL] * 2
