"""The user data as a shell runs it: installs, starts, keeps going, and says in one line why it cannot."""

from __future__ import annotations

import ast
import base64
import contextlib
import gzip
import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from boot_world import BUCKET, CREDENTIALS, FLEET, INSTANCE, REGION, STORE, Cloud, boot_world, signature_fault, wheel
from hypothesis import given, settings
from hypothesis import strategies as st

from spotheal import userdata
from spotheal.agent.protocol.ends import STARTS_WITHOUT_PROGRESS_MAX
from spotheal.agent.protocol.errors import ExitCode
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job import parse_job
from spotheal.agent.protocol.names import Phase, StoreUrl
from spotheal.fleet.request import wheelhouse
from spotheal.userdata import report, start

CONFIG = {
    "run": {"id": "01J0000000000000000000000", "region": REGION, "store": STORE},
    "job": {"name": "digits"},
    "cage": {"mode": "on", "user": "spotheal-trainer"},
    "volume": {"mount": "/dltraining"},
}
LAUNCH = f"launches/{INSTANCE}.json"
# Stands for the agent: leaves a line for each start, then does what the file `behave` says.
AGENT = """
import json, os, sys, time
root = os.environ["SPOTHEAL_ROOT"]
if sys.argv[1] == "check":
    sys.exit(open(root + "/check").read() if os.path.exists(root + "/check") else 0)
with open(root + "/starts", "a") as file:
    file.write(json.dumps({"pid": os.getpid(), "argv": sys.argv, "isolated": sys.flags.isolated}) + "\\n")
behave = open(root + "/behave").read().split()
starts = len(open(root + "/starts").readlines())
code = behave[min(starts, len(behave)) - 1]
if code == "stay":
    time.sleep(60)
sys.exit(int(code))
"""
OWN = {
    "spotheal/userdata/__init__.py": "", "spotheal/userdata/start.py": Path(start.__file__).read_text(),
    "spotheal/agent/__init__.py": "", "spotheal/agent/__main__.py": AGENT, "spotheal/training/__init__.py": "",
    "spotheal/userdata/spotheal-agent.service": "[Service]\n",
}  # fmt: skip
WHEELS = {
    "spotheal-0.1.0-py3-none-any.whl": wheel(OWN),
    "structlog-25.1-py3-none-any.whl": wheel({"structlog/__init__.py": "", "structlog-25.1.data/scripts/x": ""}),
}


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    with boot_world() as world:
        yield world
        assert world.bad_signatures == []


class Instance:
    """A machine below `root` that runs user data with a `shutdown` of its own."""

    def __init__(self, root: Path, cloud: Cloud) -> None:
        self.root = root
        programs = root / "programs"
        programs.mkdir(parents=True)
        self.python = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]
        (programs / "python3").symlink_to(self.python)
        (programs / "shutdown").write_text(f'#!/bin/sh\necho "$@" >>{root}/shutdown\n')
        (programs / "shutdown").chmod(0o755)
        self.behave("stay")
        self.config: dict[str, Any] = CONFIG
        self.stub_edits: dict[str, str] = {}
        self.start_edits: dict[str, str] = {}
        self.environment = {
            "PATH": f"{programs}:/usr/bin:/bin", "SPOTHEAL_ROOT": str(root), "HOME": str(root), **cloud.environment(),
        }  # fmt: skip

    def wheels(self) -> dict[str, bytes]:
        """`WHEELS`, with the edits of start.py."""
        text = Path(start.__file__).read_text()
        for old, new in self.start_edits.items():
            assert old in text
            text = text.replace(old, new)
        name = next(iter(WHEELS))
        return {**WHEELS, name: wheel({**OWN, "spotheal/userdata/start.py": text})}

    def behave(self, *codes: str) -> None:
        (self.root / "behave").write_text(" ".join(codes))

    def boot(self, manifest_sha256: str, shell: str = "sh", patience: str = "") -> subprocess.CompletedProcess[str]:
        text = userdata.render(json.dumps(self.config), manifest_sha256)
        if patience:  # the same bootstrap, less patient, so that a test need not wait for minutes
            impatient = re.sub(r"_SECONDS=\d+\.0", f"_SECONDS={patience}", userdata.program("report"))
            assert impatient != userdata.program("report")
            text = text.replace(userdata.packed(userdata.program("report")), userdata.packed(impatient))
        for old, new in self.stub_edits.items():
            assert old in text
            text = text.replace(old, new)
        (self.root / "user-data").write_text(text)
        with (self.root / "console").open("w") as console:
            return subprocess.run(
                [shell, str(self.root / "user-data")], env=self.environment, stdin=subprocess.DEVNULL,
                stdout=console, stderr=console, text=True, timeout=60, check=False,
            )  # fmt: skip

    @property
    def console(self) -> str:
        return (self.root / "console").read_text()

    def starts(self) -> list[dict[str, Any]]:
        file = self.root / "starts"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def end(self) -> None:
        for pid in _holders_of(self.root):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _holders_of(root: Path) -> list[int]:
    """Processes that were started with this SPOTHEAL_ROOT."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"SPOTHEAL_ROOT={root}".encode() in (entry / "environ").read_bytes().split(
                b"\0"
            ):
                found.append(int(entry.name))
    return found


@pytest.fixture
def instance(tmp_path: Path, cloud: Cloud) -> Iterator[Instance]:
    machine = Instance(tmp_path / "root", cloud)
    yield machine
    machine.end()
    machine.end()


def until(fact: Callable[[], bool], seconds_max: float = 20.0) -> None:
    limit = time.monotonic() + seconds_max
    while not fact():
        assert time.monotonic() < limit, "it never came true"
        time.sleep(0.02)


# ------------------------------------------------------------------------------------------------------------ the stub
def test_the_stub_is_shellcheck_clean() -> None:
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([program, "-s", "sh", "-"], input=userdata.stub(), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("shell", ["sh", "dash", "bash", "busybox"])
def test_every_shell_reads_the_stub(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    argv = ["busybox", "sh", "-n"] if shell == "busybox" else [shell, "-n"]
    done = subprocess.run(argv, input=userdata.stub(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_each_payload_has_one_place() -> None:
    for name in userdata.PAYLOADS:
        assert userdata.stub().count(f"@{name}@") == 1
        assert f"\n{name}='@{name}@'\n" in userdata.stub()


@pytest.mark.parametrize("payload", ["", "a b", "a'b", "'$(reboot)'", 'a"b', "a\n", "a\\", "a\0", "é"])
def test_a_payload_with_a_quote_or_anything_but_base85_is_refused(payload: str) -> None:
    with pytest.raises(ValueError, match="CONFIG must hold only"):
        userdata.fill({"REPORT": "a", "BOOTSTRAP": "a", "CONFIG": payload, "MANIFEST_SHA256": "0"})


@pytest.mark.parametrize("shell", ["sh", "dash", "bash", "busybox"])
def test_every_shell_takes_the_digits_of_base85_between_quotes_as_they_are(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    digits = "".join(sorted({chr(byte) for pair in range(2**16) for byte in base64.b85encode(pair.to_bytes(2, "big"))}))
    assert len(digits) == 85
    text = userdata.fill({"REPORT": "a", "BOOTSTRAP": digits, "CONFIG": digits, "MANIFEST_SHA256": "0"})
    (line,) = [line for line in text.splitlines() if line.startswith("CONFIG=")]
    argv = ["busybox", "sh"] if shell == "busybox" else [shell]
    program = f"{line}\nprintf '%s' \"$CONFIG\"\n"
    assert subprocess.run(argv, input=program, capture_output=True, text=True, check=True).stdout == digits


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_whatever_the_configuration_holds_only_the_payload_differs(hostile: str) -> None:
    text = userdata.render(json.dumps({"environment": {"X": hostile}}), "0" * 64)
    found = re.search(r"^CONFIG='([^']+)'$", text, re.MULTILINE)
    assert found
    assert {"environment": {"X": hostile}} == json.loads(gzip.decompress(base64.b85decode(found.group(1))))
    assert text.replace(found.group(1), "") == userdata.render("", "0" * 64).replace(userdata.packed(""), "")


def test_the_user_data_leaves_room_for_a_job() -> None:
    assert len(userdata.render("", "0" * 64)) < 12_800


@pytest.mark.parametrize("name", ["report", "bootstrap"])
def test_the_program_on_the_instance_is_the_one_here_without_docstrings_and_annotations(name: str) -> None:
    packaged = (Path(userdata.__file__).parent / f"{name}.py").read_text()
    rendered = userdata.program(name).replace("from report import", "from spotheal.userdata.report import")
    here, there = ast.parse(packaged), ast.parse(rendered)
    kept = {ast.dump(node) for node in there.body}
    imports = [node for node in here.body if isinstance(node, ast.ImportFrom) and ast.dump(node) not in kept]
    assert {node.module for node in imports} <= {"__future__", "collections.abc", "typing"}
    here.body = [node for node in here.body if node not in imports]
    names = {alias.name for node in imports for alias in node.names}
    assert names.isdisjoint(node.id for node in ast.walk(there) if isinstance(node, ast.Name))
    for tree in (here, there):
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
                node.body = node.body[1:]
            if isinstance(node, (ast.FunctionDef, ast.arg)):
                for field in {"returns", "annotation"} & set(node._fields):
                    setattr(node, field, None)
    plain = re.sub(r"AnnAssign\(target=(.*?), annotation=.*?, value=", r"Assign(targets=[\1], value=", ast.dump(here))
    assert len(plain) > 15_000
    assert re.sub(r", simple=\d", "", plain) == re.sub(r", simple=\d", "", ast.dump(there))


@pytest.mark.parametrize("name", ["report", "bootstrap"])
def test_what_reports_a_failure_runs_on_python_3_7(name: str) -> None:
    """`|` of dictionaries came with 3.9; its other uses, of sets and flags, are written otherwise."""
    tree = ast.parse(userdata.program(name), feature_version=(3, 7))
    for node in ast.walk(tree):
        joined = isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.BitOr)
        assert not joined, ast.unparse(node)
        assert not isinstance(node, ast.Attribute) or node.attr not in ("removeprefix", "removesuffix", "unparse")


def _python_is(machine: Instance, shim: str) -> None:
    """Only `shim` stands for a Python on `machine`."""
    if any(Path(place).exists() for place in ("/usr/local/bin/python3", "/opt/conda/bin/python3")):
        pytest.skip("this machine has a Python where images have theirs")
    old = machine.root / "programs/python3"
    old.unlink()
    old.write_text(shim)
    old.chmod(0o755)
    for program in ("mkdir", "mv"):
        (old.parent / program).symlink_to(f"/bin/{program}")
    machine.environment["PATH"] = str(old.parent)
    machine.stub_edits = {"/usr/bin/python3 ": "/nowhere/python3 "}


def test_a_machine_without_python_says_so(tmp_path: Path, cloud: Cloud) -> None:
    machine = Instance(tmp_path / "root", cloud)
    _python_is(machine, "#!/bin/sh\nexit 1\n")
    assert machine.boot("0" * 64, shell="/bin/sh").returncode == 1
    assert machine.console.startswith("spotheal: this machine cannot start the job: no Python 3.10 or newer")


def test_a_python_that_is_too_old_reports_that(instance: Instance, cloud: Cloud) -> None:
    """As on Amazon Linux 2023, whose Python is 3.9: the launch is counted, with the reason, and the machine ends."""
    older = f"{instance.root}/older.py"
    Path(older).write_text(
        "import runpy, sys\nsys.version_info, sys.version = (3, 9, 16), '3.9.16 (main)'\n"
        "sys.argv = sys.argv[1:]\nsys.path.insert(0, sys.argv[0].rpartition('/')[0])\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    _python_is(
        instance,
        "#!/bin/sh\n"
        'case "$3" in *"(3, 10)"*) exit 1;; esac\n'  # what the stub asks of each Python
        f'case "$2" in */bootstrap.py) exec {instance.python} -I {older} "$2" "$3";; esac\n'
        f'exec {instance.python} "$@"\n',
    )
    assert instance.boot(cloud.put_wheels(WHEELS), shell="/bin/sh").returncode == 1
    assert f"no Python 3.10 or newer on this image: the best is {instance.python}, 3.9.16" in instance.console
    assert cloud.document(LAUNCH)["outcome"] == "boot failed"
    assert "no Python 3.10" in str(cloud.document(LAUNCH)["reason"])
    assert (instance.root / "shutdown").read_text() == "-h now\n"


def _broken(instance: Instance, text: str) -> None:
    """bootstrap.py on this machine is `text`."""
    instance.stub_edits = {userdata.packed(userdata.program("bootstrap")): userdata.packed(text)}


@pytest.mark.parametrize(
    "text", ["f'{instance['instanceId']}' = ", "import no_such_module", "import os; os.kill(os.getpid(), 9)", "1 / 0"]
)
def test_a_bootstrap_that_dies_at_its_start_is_a_counted_failure(instance: Instance, cloud: Cloud, text: str) -> None:
    """The stub became bootstrap.py: where that could not be parsed, nobody counted, and the machine cost."""
    _broken(instance, text)
    assert instance.boot(cloud.put_wheels(WHEELS)).returncode == 1
    launch = cloud.document(LAUNCH)
    reason = f"bootstrap.py died in {instance.root}/programs/python3; its last lines on the console say why"
    assert launch["outcome"] == "boot failed" and launch["reason"] == reason
    assert (instance.root / "shutdown").read_text() == "-h now\n"


def test_the_fifth_bootstrap_in_a_row_that_dies_at_its_start_parks_the_run(instance: Instance, cloud: Cloud) -> None:
    _earlier_launches(cloud, [FAILED] * 4)
    _broken(instance, "syntax error")
    instance.boot(cloud.put_wheels(WHEELS))
    assert cloud.document("status.json")["phase"] == "parked"
    assert "CancelSpotFleetRequests" in {form["Action"] for form in cloud.ec2}


def test_a_fault_of_bootstrap_itself_is_a_counted_failure(instance: Instance, cloud: Cloud) -> None:
    text = userdata.program("bootstrap")
    assert text.count("def install(aws,manifest_sha256):\n") == 1
    _broken(instance, text.replace("def install(aws,manifest_sha256):\n", "def install(aws,manifest_sha256):\n 1/0\n"))
    instance.boot(cloud.put_wheels(WHEELS))
    assert "ZeroDivisionError: division by zero\n" in instance.console
    assert str(cloud.document(LAUNCH)["reason"]).startswith("bootstrap.py died in ")


def test_a_failure_that_nothing_can_count_leaves_the_machine_up_and_says_so(instance: Instance, cloud: Cloud) -> None:
    """One that switched itself off would be replaced without end."""
    instance.stub_edits = {
        userdata.packed(userdata.program(name)): userdata.packed("syntax error") for name in ("bootstrap", "report")
    }
    assert instance.boot(cloud.put_wheels(WHEELS)).returncode == 1
    assert instance.console.splitlines()[-1] == (
        "spotheal: it stays up, since nothing here can count that failure; next: fleetctl cancel"
    )
    assert not (instance.root / "shutdown").exists() and cloud.asked == []


def test_a_disk_that_cannot_be_written_is_reported_from_memory(instance: Instance, cloud: Cloud) -> None:
    (instance.root / "opt").write_text("in the way")
    assert instance.boot(cloud.put_wheels(WHEELS)).returncode == 1
    said = f"{instance.root}/opt/spotheal cannot be written: the disk is full or read-only"
    assert f"spotheal: this machine cannot start the job: {said}\n" in instance.console
    assert (cloud.document(LAUNCH)["outcome"], cloud.document(LAUNCH)["reason"]) == ("boot failed", said)
    assert (instance.root / "shutdown").read_text() == "-h now\n"


def test_the_console_names_the_python_and_why(instance: Instance, cloud: Cloud) -> None:
    instance.boot(cloud.put_wheels(WHEELS))
    assert f"spotheal: using {instance.root}/programs/python3, the first Python 3.10 or newer\n" in instance.console


# ---------------------------------------------------------------------------------------------------------- a good boot
@pytest.mark.parametrize(("shell", "absent"), [("dash", 403), ("bash", 404)])
def test_a_boot_installs_and_starts_the_agent(instance: Instance, cloud: Cloud, shell: str, absent: int) -> None:
    cloud.absent = absent
    assert instance.boot(cloud.put_wheels(WHEELS), shell=shell).returncode == 0, instance.console
    until(lambda: len(instance.starts()) == 1)
    home = instance.root / "opt/spotheal"
    (start,) = instance.starts()
    assert start["argv"][1:] == ["run", "--config", str(home / "config.json")]
    assert start["isolated"] == 1
    assert json.loads((home / "config.json").read_text()) == CONFIG
    assert (home / "config.json").stat().st_mode & 0o077 == 0
    assert sorted(path.name for path in home.iterdir()) == [
        "agent",
        "bootstrap.py",
        "config.json",
        "report.py",
        "trainer",
    ]
    inside = {str(path.relative_to(home / "trainer")) for path in (home / "trainer").rglob("*.py")}
    assert {"spotheal/agent/__init__.py", "spotheal/training/__init__.py"} < inside
    assert not any("userdata" in path or "structlog" in path for path in inside)
    launch = cloud.document(LAUNCH)
    assert (launch["instance"], launch["zone"], launch["outcome"]) == (INSTANCE, "us-west-2b", "booting")
    assert cloud.asked[:2] == [("LIST", LAUNCH), ("PUT", LAUNCH)], "counted before anything can fail"
    assert instance.console in (instance.root / "var/log/spotheal/user-data.log").read_text()


@pytest.mark.parametrize("absent", [403, 404])
def test_no_boot_waits_because_the_store_says_forbidden_of_what_is_absent(
    instance: Instance, cloud: Cloud, absent: int
) -> None:
    """A minute of each first boot went by where the role may list its own job only, as `init` makes it."""
    cloud.absent = absent
    assert instance.boot(cloud.put_wheels(WHEELS)).returncode == 0
    assert " yet: " not in instance.console
    assert not any(command == "GET" and key == LAUNCH for command, key in cloud.asked)


def test_a_run_without_a_status_is_parked_with_one(instance: Instance, cloud: Cloud) -> None:
    _earlier_launches(cloud, [FAILED] * 4)
    instance.boot(_changed(cloud))
    assert cloud.document("status.json")["phase"] == "parked"


def test_the_user_data_again_starts_no_second_agent_and_fetches_nothing(instance: Instance, cloud: Cloud) -> None:
    digest = cloud.put_wheels(WHEELS)
    instance.boot(digest)
    until(lambda: len(instance.starts()) == 1)
    asked = len(cloud.asked)
    cloud.objects[LAUNCH] = json.dumps({**cloud.document(LAUNCH), "acknowledged": True}).encode()
    assert instance.boot(digest).returncode == 0
    until(lambda: "the agent runs already" in instance.console)
    assert cloud.asked[asked:] == [("LIST", LAUNCH), ("GET", LAUNCH), ("PUT", LAUNCH)]
    assert cloud.document(LAUNCH)["acknowledged"] is True
    assert len(instance.starts()) == 1


def test_other_wheels_take_the_place_of_the_old_ones(instance: Instance, cloud: Cloud) -> None:
    instance.behave("0")
    instance.boot(cloud.put_wheels(WHEELS))
    newer = {**WHEELS, "extra-1-py3-none-any.whl": wheel({"extra.py": "", "spotheal/agent/x": ""})}
    assert instance.boot(cloud.put_wheels(newer)).returncode == 0
    site = next((instance.root / "opt/spotheal/agent/lib").glob("python*/site-packages"))
    assert (site / "extra.py").exists()
    assert not list((instance.root / "opt/spotheal").glob(".new-*"))


def _real_configuration() -> str:
    job = parse_job({"job": {"name": "digits", "repository": "https://example.org/r", "command": ["python"]}})
    return InstanceConfig(job, "run", REGION, StoreUrl.parse(STORE), "0" * 40, "2026-01-01T00:00:00Z").to_json()


@pytest.mark.processes
def test_the_wheelhouse_is_all_that_the_agent_needs(instance: Instance, cloud: Cloud, tmp_path: Path) -> None:
    """On a Python that has nothing of ours; the agent refuses this test's configuration, but it is the real one."""
    house = wheelhouse.build(tmp_path / "cache")
    cloud.objects |= {f"agent/wheels/{w.name}": (house.folder / w.name).read_bytes() for w in house.wheels}
    cloud.objects["agent/manifest.json"] = house.manifest
    assert instance.boot(house.sha256).returncode == 1
    home = instance.root / "opt/spotheal"
    refused = "the agent cannot run here: the agent's configuration: schema_version: must be 1; "
    assert refused in str(cloud.document(LAUNCH)["reason"])
    assert "[job] repository: is required" in str(cloud.document(LAUNCH)["reason"])
    (tmp_path / "config.json").write_text(_real_configuration())
    argv = [*_agent_argv()[1:-3], "check", "--config", str(tmp_path / "config.json")]
    done = subprocess.run([str(home / "agent/bin/python"), *argv], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), "on a Python that has nothing but our wheels"
    shutil.rmtree(next((home / "agent/lib").glob("python*/site-packages/botocore/data/scheduler")))
    done = subprocess.run([str(home / "agent/bin/python"), *argv], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "botocore has no models here of scheduler\n")
    library = {"PYTHONPATH": str(home / "trainer"), "PATH": "/usr/bin:/bin"}
    code = "import spotheal.training, spotheal.agent.protocol.contract as c; print(c.__file__)"
    done = subprocess.run([instance.python, "-c", code], env=library, capture_output=True, text=True)
    assert done.stdout.startswith(f"{home}/trainer/"), done.stderr


@pytest.mark.processes
def test_an_agent_that_is_killed_or_fails_is_started_again_until_it_ends_with_0(
    instance: Instance, cloud: Cloud
) -> None:
    instance.behave("stay", "1", "0", "stay")
    instance.boot(cloud.put_wheels(WHEELS))
    until(lambda: len(instance.starts()) == 1)
    os.kill(instance.starts()[0]["pid"], signal.SIGKILL)
    until(lambda: len(instance.starts()) == 3)
    until(lambda: not _holders_of(instance.root))
    assert len(instance.starts()) == 3


@pytest.mark.processes
def test_a_keeper_that_is_asked_to_end_asks_the_agent(instance: Instance, cloud: Cloud) -> None:
    instance.boot(cloud.put_wheels(WHEELS))
    until(lambda: len(instance.starts()) == 1)
    agent = instance.starts()[0]["pid"]
    keeper = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(keeper, signal.SIGTERM)
    until(lambda: not _holders_of(instance.root))
    assert len(instance.starts()) == 1


@pytest.mark.processes
def test_an_agent_that_ends_again_and_again_is_a_boot_that_failed(instance: Instance, cloud: Cloud) -> None:
    instance.behave("7")
    instance.start_edits = {"STARTS_MAX, STARTS_SECONDS = 15, 300.0": "STARTS_MAX, STARTS_SECONDS = 3, 300.0"}
    instance.boot(cloud.put_wheels(instance.wheels()))
    until(lambda: (instance.root / "shutdown").exists())
    launch = cloud.document(LAUNCH)
    assert launch["outcome"] == "boot failed"
    assert launch["reason"] == "the agent ended 3 times in a row, each within 60 s, the last time with 7"
    assert len(instance.starts()) == 3


@pytest.mark.processes
def test_an_agent_that_fails_slowly_on_a_busy_machine_is_counted_too(instance: Instance, cloud: Cloud) -> None:
    """A window over all starts never held 15 of 25 s each: without systemd that machine cost for ever."""
    instance.behave("7")
    instance.start_edits = {"STARTS_MAX, STARTS_SECONDS = 15, 300.0": "STARTS_MAX, STARTS_SECONDS = 3, 0.1"}
    instance.boot(cloud.put_wheels(instance.wheels()))
    until(lambda: (instance.root / "shutdown").exists())
    assert len(instance.starts()) == 3


@pytest.mark.processes
def test_an_agent_whose_failure_cannot_be_counted_is_started_again(instance: Instance, cloud: Cloud) -> None:
    instance.behave("7", "7", "7", "stay")
    instance.start_edits = {"STARTS_MAX, STARTS_SECONDS = 15, 300.0": "STARTS_MAX, STARTS_SECONDS = 3, 300.0"}
    wheels = cloud.put_wheels(instance.wheels())
    assert instance.boot(wheels, patience="0.1").returncode == 0
    cloud.faults[LAUNCH] = [403] * 99
    cloud.ec2_refuses = True
    until(lambda: len(instance.starts()) == 4)
    assert not (instance.root / "shutdown").exists()


# --------------------------------------------------------------------------------------------------- faults that pass
def test_an_object_of_any_size_takes_no_more_memory_than_ours(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may write to the store may write a status of a TiB; the machine that counts its failure has 1 GiB."""
    monkeypatch.setattr(report, "ANSWER_BYTES_MAX", 4000)
    cloud.objects["status.json"] = json.dumps({"phase": "done", "reason": "x" * 8000}).encode()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    for name, value in cloud.environment().items():
        monkeypatch.setenv(name, value)
    assert report.Aws(REGION, STORE, report.Metadata()).document("status.json") == {}


def test_faults_that_pass_are_waited_for(instance: Instance, cloud: Cloud) -> None:
    name = next(iter(WHEELS))
    cloud.faults = {LAUNCH: [0], "agent/manifest.json": [503, 500], f"agent/wheels/{name}": [0, 429]}
    role = cloud.imds.replies["/latest/meta-data/iam/security-credentials/"]
    cloud.imds.forgets("/latest/meta-data/iam/security-credentials/")

    def attach_role(method: str, path: str) -> None:
        if path.endswith("security-credentials/") and len(cloud.imds.requests) > 6:
            cloud.imds.replies["/latest/meta-data/iam/security-credentials/"] = role

    cloud.imds.every = attach_role
    assert instance.boot(cloud.put_wheels(WHEELS)).returncode == 0, instance.console
    assert f"could not list the store's {LAUNCH} yet: no role's credentials on this instance (404" in instance.console
    assert cloud.faults == {LAUNCH: [], "agent/manifest.json": [], f"agent/wheels/{name}": []}


def test_an_instance_without_metadata_says_so(instance: Instance, cloud: Cloud) -> None:
    instance.environment["AWS_EC2_METADATA_SERVICE_ENDPOINT"] = "http://127.0.0.1:9"
    assert instance.boot("0" * 64, patience="0.1").returncode == 1
    last = instance.console.splitlines()[-1]
    assert "cannot start the job: could not read who this instance is in 0 s:" in last


# ----------------------------------------------------------------------------------------------------- faults that stay
def test_a_bucket_in_another_region_is_named(instance: Instance, cloud: Cloud) -> None:
    """S3 redirects; a signed request is good for one address, so that nothing can be read or counted there."""
    cloud.bucket_region = "eu-central-1"
    cloud.tagged_instances = 1
    assert instance.boot(cloud.put_wheels(WHEELS)).returncode == 1
    said = "301 PermanentRedirect: the store's bucket is in another region, eu-central-1; request the run there"
    assert said in instance.console
    assert said in next(form["Tag.1.Value"] for form in cloud.ec2 if form["Action"] == "CreateTags")


def _changed(cloud: Cloud) -> str:
    cloud.put_wheels(WHEELS)
    return "0" * 64


def _wheel_changed(cloud: Cloud) -> str:
    digest = cloud.put_wheels(WHEELS)
    cloud.objects["agent/wheels/structlog-25.1-py3-none-any.whl"] += b"x"
    return digest


def _wheel_missing(cloud: Cloud) -> str:
    digest = cloud.put_wheels(WHEELS)
    del cloud.objects["agent/wheels/structlog-25.1-py3-none-any.whl"]
    return digest


def _compiled(cloud: Cloud) -> str:
    return cloud.put_wheels({"x-1-cp311-cp311-linux_x86_64.whl": b""})


def _hostile_name(cloud: Cloud) -> str:
    return cloud.put_wheels({"../../x-1-py3-none-any.whl": b""})


def _traversal(cloud: Cloud) -> str:
    return cloud.put_wheels({"x-1-py3-none-any.whl": wheel({"../../../../escaped": ""})})


def _no_zip(cloud: Cloud) -> str:
    return cloud.put_wheels({"x-1-py3-none-any.whl": b"no zip"})


PERMANENT = {
    _changed: "agent/manifest.json is not the one of this user data",
    _wheel_changed: "wheel structlog-25.1-py3-none-any.whl is not the one in the manifest (sha256 differs)",
    _wheel_missing: "could not read the store's wheel structlog-25.1-py3-none-any.whl: it is not there",
    _compiled: "'x-1-cp311-cp311-linux_x86_64.whl' in the manifest is no wheel that suits every machine",
    _hostile_name: "in the manifest is no wheel that suits every machine",
    _traversal: "has a path out of its folder: '../../../../escaped'",
    _no_zip: "the agent cannot be unpacked",
}


@pytest.mark.parametrize("spoil", PERMANENT, ids=lambda spoil: spoil.__name__.strip("_"))
def test_a_boot_that_cannot_go_on_says_why_is_counted_and_switches_off(
    instance: Instance, cloud: Cloud, spoil: Callable[[Cloud], str]
) -> None:
    assert instance.boot(spoil(cloud)).returncode == 1
    (line,) = [line for line in instance.console.splitlines() if "cannot start the job" in line]
    assert line.startswith("spotheal: ") and PERMANENT[spoil] in line
    launch = cloud.document(LAUNCH)
    assert launch["outcome"] == "boot failed"
    assert PERMANENT[spoil] in str(launch["reason"])
    assert (instance.root / "shutdown").read_text() == "-h now\n"
    assert instance.starts() == []
    assert not (instance.root / "opt/spotheal/agent").exists()
    assert not list((instance.root / "opt/spotheal").glob(".new-*"))
    (tagged,) = cloud.ec2  # and nothing else: one boot that failed ends no run
    assert (tagged["Action"], tagged["ResourceId.1"]) == ("CreateTags", INSTANCE)
    assert tagged["Tag.1.Key"] == "spotheal:reason" and PERMANENT[spoil] in tagged["Tag.1.Value"]


def _earlier_launches(cloud: Cloud, outcomes: list[dict[str, object]]) -> None:
    for number, outcome in enumerate(outcomes):
        body = {"instance": f"i-{number}", "time": f"2026-11-21T0{number}:00:00Z", **outcome}
        cloud.objects[f"launches/i-{number}.json"] = json.dumps(body).encode()


FAILED: dict[str, object] = {"outcome": "boot failed", "reason": "x"}


@pytest.mark.parametrize("absent", [403, 404])
@pytest.mark.parametrize(
    "spoil", [_changed, _wheel_missing, _wheel_changed], ids=lambda spoil: spoil.__name__.strip("_")
)
def test_the_fifth_boot_in_a_row_that_fails_parks_the_run(
    instance: Instance, cloud: Cloud, spoil: Callable[[Cloud], str], absent: int
) -> None:
    cloud.absent = absent
    _earlier_launches(cloud, [FAILED, {"outcome": "interrupted"}, FAILED, FAILED, {"outcome": "booting"}])
    cloud.objects["status.json"] = json.dumps({"phase": "training", "volume": "vol-1"}).encode()
    cloud.refused_cancels = 1
    instance.boot(spoil(cloud))
    status = cloud.document("status.json")
    assert (status["phase"], status["volume"], status["fleet"]) == ("parked", "vol-1", FLEET)
    reason = str(status["reason"])
    assert reason.startswith("5 launches in a row acknowledged no new checkpoint; the last one said: ")
    assert PERMANENT[spoil] in reason
    cancels = [form for form in cloud.ec2 if form["Action"] == "CancelSpotFleetRequests"]
    assert len(cancels) == 2, "refused inside a successful answer, then done"
    assert cancels[0]["SpotFleetRequestId.1"] == FLEET and cancels[0]["TerminateInstances"] == "true"
    assert ("PUT", "status.json") in cloud.asked


@pytest.mark.parametrize("before", [None, {"phase": "training", "volume": "vol-1"}], ids=["no status", "a status"])
def test_a_status_that_another_machine_writes_meanwhile_is_kept(
    instance: Instance, cloud: Cloud, before: dict[str, object] | None
) -> None:
    _earlier_launches(cloud, [FAILED] * 4)
    if before:
        cloud.objects["status.json"] = json.dumps(before).encode()
    cloud.late["status.json"] = json.dumps({"phase": "training", "volume": "vol-2", "term": 7}).encode()
    instance.boot(_changed(cloud))
    status = cloud.document("status.json")
    assert (status["phase"], status["volume"], status["term"]) == ("parked", "vol-2", 7)
    assert str(status["ended"]).endswith("Z"), "the receipt counts to the end of the run"


def test_an_end_that_another_machine_writes_meanwhile_stands(instance: Instance, cloud: Cloud) -> None:
    _earlier_launches(cloud, [FAILED] * 4)
    cloud.late["status.json"] = json.dumps({"phase": "cancelled"}).encode()
    instance.boot(_changed(cloud))
    assert cloud.document("status.json") == {"phase": "cancelled"}
    assert "CancelSpotFleetRequests" in {form["Action"] for form in cloud.ec2}


def test_machines_that_boot_beside_one_that_fails_are_no_failures(instance: Instance, cloud: Cloud) -> None:
    """The twenty machines of a sweep boot at once: one whose disk was bad ended all of it."""
    young = (datetime.now(timezone.utc) - timedelta(seconds=40)).strftime("%Y-%m-%dT%H:%M:%SZ")
    _earlier_launches(cloud, [{"outcome": "booting", "time": young}] * 9)
    cloud.states = {f"i-{number}": ("running", "") for number in range(9)}
    instance.boot(_changed(cloud))
    assert {form["Action"] for form in cloud.ec2} == {"CreateTags", "DescribeInstances"}
    cloud.states |= {f"i-{number}": ("terminated", "Client.InstanceInitiatedShutdown") for number in range(4)}
    instance.boot(_changed(cloud))
    assert "CancelSpotFleetRequests" in {form["Action"] for form in cloud.ec2}, "those came to nothing"


def test_an_end_that_is_recorded_stands_and_only_its_fleet_is_cancelled(instance: Instance, cloud: Cloud) -> None:
    _earlier_launches(cloud, [FAILED] * 4)
    cloud.objects["status.json"] = json.dumps({"phase": "done", "reason": "because"}).encode()
    instance.boot(_changed(cloud))
    assert {"phase": "done", "reason": "because"} == cloud.document("status.json")
    assert "CancelSpotFleetRequests" in {form["Action"] for form in cloud.ec2}


@pytest.mark.parametrize(
    "between",
    [{"acknowledged": True}, {"outcome": "interrupted"}, {"outcome": "barred"}, {"requested_at": "of another request"}],
)
def test_progress_and_interruptions_keep_the_fleet(
    instance: Instance, cloud: Cloud, between: dict[str, object]
) -> None:
    _earlier_launches(cloud, [FAILED] * 3 + [between] if "outcome" in between else [FAILED, FAILED, between, FAILED])
    instance.boot(_changed(cloud))
    assert {form["Action"] for form in cloud.ec2} == {"CreateTags"}


def test_a_failure_that_cannot_be_recorded_leaves_the_machine_up(instance: Instance, cloud: Cloud) -> None:
    cloud.faults[LAUNCH] = [403] * 99
    cloud.ec2_refuses = True
    assert instance.boot(cloud.put_wheels(WHEELS), patience="0.1").returncode == 1
    assert "the machine stays up, since its failure could not be recorded: could not list" in instance.console
    assert not (instance.root / "shutdown").exists()


@pytest.mark.parametrize(("tagged", "cancelled"), [(4, False), (5, True)])
def test_where_the_store_refuses_the_tags_of_instances_are_counted(
    instance: Instance, cloud: Cloud, tagged: int, cancelled: bool
) -> None:
    cloud.faults = {LAUNCH: [403] * 99, "status.json": [403] * 99}
    cloud.tagged_instances = tagged
    instance.boot(cloud.put_wheels(WHEELS), patience="0.1")
    assert [form["Tag.1.Key"] for form in cloud.ec2 if form["Action"] == "CreateTags"] == ["spotheal:reason"]
    assert ("CancelSpotFleetRequests" in {form["Action"] for form in cloud.ec2}) == cancelled
    assert (instance.root / "shutdown").read_text() == "-h now\n"


def test_a_failed_boot_stays_up_as_long_as_it_was_asked_to(instance: Instance, cloud: Cloud) -> None:
    instance.config = {**CONFIG, "job": {"name": "digits", "keep_on_failure": "2s"}}
    _earlier_launches(cloud, [FAILED] * 4)
    instance.boot(_changed(cloud))
    assert "this machine stays up for 2s to be looked at (keep_on_failure)" in instance.console
    counted = cloud.times[("PUT", LAUNCH)]
    assert cloud.times["CancelSpotFleetRequests"] - counted >= 2.0, "it was counted before, and the fleet ended after"


# ----------------------------------------------------------------------------------------- bootstrap.py, piece by piece
def test_the_ends_it_knows_are_those_of_the_agent() -> None:
    assert {phase.value for phase in Phase if phase.is_end} == set(report.ENDS)


@pytest.fixture
def bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("SPOTHEAL_ROOT", str(tmp_path / "piece"))
    spec = importlib.util.spec_from_file_location(
        "bootstrap_under_test", Path(userdata.__file__).parent / "bootstrap.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("region", "bucket", "url"),
    [
        ("us-west-2", BUCKET, f"https://{BUCKET}.s3.us-west-2.amazonaws.com/a%20b/c%2Bd/agent/manifest.json"),
        ("us-gov-west-1", "bucket", "https://bucket.s3.us-gov-west-1.amazonaws.com/a%20b/c%2Bd/agent/manifest.json"),
        ("cn-north-1", "bucket", "https://bucket.s3.cn-north-1.amazonaws.com.cn/a%20b/c%2Bd/agent/manifest.json"),
        ("eusc-de-east-1", "bucket", "https://bucket.s3.eusc-de-east-1.amazonaws.eu/a%20b/c%2Bd/agent/manifest.json"),
        ("us-west-2", "dots.in.it", "https://s3.us-west-2.amazonaws.com/dots.in.it/a%20b/c%2Bd/agent/manifest.json"),
    ],
)
def test_addresses_at_aws(monkeypatch: pytest.MonkeyPatch, region: str, bucket: str, url: str) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    frozen = CREDENTIALS.get_frozen_credentials()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", frozen.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", frozen.secret_key)
    monkeypatch.setenv("AWS_SESSION_TOKEN", frozen.token or "")
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(report, "http_call", lambda *args: calls.append(args) or b"")
    report.Aws(region, f"s3://{bucket}/a b/c+d", report.Metadata()).store("GET", "agent/manifest.json")
    ((_, method, asked, headers, _),) = calls
    assert asked == url
    if region == REGION:
        lower = {name.lower(): value for name, value in headers.items()}
        assert signature_fault(method, asked, lower, b"") == ""


MOUNTED = {"volume": {"mount": "/data/dl-1"}}


class Systemd:
    """Stands for systemctl: knows what was asked of it; the agent is active at the third look."""

    def __init__(self) -> None:
        self.argvs: list[list[str]] = []

    def __call__(self, argv: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.argvs.append(argv[1:])
        looks = sum(argv[0] == "show" for argv in self.argvs)
        return subprocess.CompletedProcess(argv, 0, "active\n" if looks > 2 else "activating\n", "")


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Systemd:
    """A machine that is ours, but for its folders."""
    for folder in ("units", "needrestart"):
        (tmp_path / folder).mkdir()
    said = Systemd()
    monkeypatch.setattr(start, "HOME", str(tmp_path))
    monkeypatch.setattr(start, "UNITS", f"{tmp_path}/units/")
    monkeypatch.setattr(start, "NEEDRESTART", f"{tmp_path}/needrestart/conf.d/")
    monkeypatch.setattr(start, "has_systemd", lambda: True)
    monkeypatch.setattr(start, "RUN_FOLDER", f"{tmp_path}/run")
    monkeypatch.setattr(start.subprocess, "run", said)
    return said


def test_systemd_gets_the_unit_and_the_endpoints(
    systemd: Systemd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://10.0.0.1:9000")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "never")
    start.start(MOUNTED, "a" * 64)
    assert (tmp_path / "units/spotheal-agent.service").read_text() == userdata.unit()
    assert systemd.argvs[:2] == [["daemon-reload"], ["enable", "--now", "--no-block", "spotheal-agent.service"]]
    environment = (tmp_path / "environment").read_text()
    assert 'AWS_ENDPOINT_URL_S3="http://10.0.0.1:9000"' in environment
    assert "never" not in environment


def test_the_volume_is_unmounted_after_the_agent_at_a_shutdown(systemd: Systemd, tmp_path: Path) -> None:
    start.start(MOUNTED, "a" * 64)
    unit = tmp_path / "units/spotheal-agent.service.d/volume.conf"
    assert unit.read_text() == "[Unit]\nAfter=data-dl\\x2d1.mount\n"


def test_needrestart_never_restarts_the_agent(systemd: Systemd, tmp_path: Path) -> None:
    """Ubuntu 24.04 restarts each service whose libraries were upgraded, without asking."""
    start.start(MOUNTED, "a" * 64)
    text = (tmp_path / "needrestart/conf.d/spotheal.conf").read_text()
    assert text == "$nrconf{override_rc}{qr(^spotheal-)} = 0;\n"


def test_a_machine_of_another_family_gets_no_configuration_of_needrestart(
    systemd: Systemd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needrestart").rmdir()
    monkeypatch.setattr(start, "DEBIAN", f"{tmp_path}/nowhere")
    start.start(MOUNTED, "a" * 64)
    assert not (tmp_path / "needrestart").exists()


def test_systemd_tells_us_each_end_and_sets_no_limit_of_its_own(systemd: Systemd, tmp_path: Path) -> None:
    """Its start limit left a machine that cost behind, and counted orderly restarts."""
    start.start(MOUNTED, "a" * 64)
    unit = (tmp_path / "units/spotheal-agent.service").read_text()
    assert "StartLimitIntervalSec=0\n" in unit and "OnFailure" not in unit
    assert re.search(r"^ExecStopPost=-.* -m spotheal\.userdata\.start ended$", unit, re.MULTILINE)
    assert start.STARTS_MAX > STARTS_WITHOUT_PROGRESS_MAX, "an agent that gets to work parks the run itself, before"


class FailedUnit:
    """spotheal-failed.service, its shell line run here."""

    def __init__(self, place: Path) -> None:
        self.place = place
        text = (place / "units/spotheal-failed.service").read_text().replace("$$", "$")
        lines = [line.partition("=")[2].lstrip("-") for line in text.splitlines() if "sh -c" in line]
        self.commands = [shlex.split(line) for line in lines]
        programs = place / "programs"
        programs.mkdir()
        (programs / "journalctl").write_text("#!/bin/sh\necho 'last words'\n")
        (programs / "journalctl").chmod(0o755)
        (place / "bootstrap.py").write_text("import sys; open(sys.argv[0] + '.said', 'w').write(sys.argv[2])")
        self.environment = {"PATH": f"{programs}:/usr/bin:/bin"}

    def reason(self) -> str:
        """What is counted."""
        for argv in self.commands:
            REAL_RUN(argv, env=self.environment, check=True)
        return (self.place / "bootstrap.py.said").read_text()


REAL_RUN = subprocess.run
COUNT_IT = ["start", "--no-block", "spotheal-failed.service"]


@pytest.fixture
def folder(systemd: Systemd, tmp_path: Path) -> Path:
    """/run/spotheal of a machine whose agent systemd starts."""
    start.start(MOUNTED, "a" * 64)
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def ends(monkeypatch: pytest.MonkeyPatch, folder: Path, result: str, ready: bool) -> None:
    """What the unit does at a start, when the agent is ready, and at its end."""
    (folder / "starting").touch()
    if ready:
        for name in ("starting", "hangs", "early"):
            (folder / name).unlink(missing_ok=True)
    monkeypatch.setenv("SERVICE_RESULT", result)
    assert start.ended() == 0


@pytest.mark.parametrize(
    ("result", "ready", "seconds", "times_max", "reason"),
    [
        ("timeout", False, 900.0, start.HANGS_MAX, start.HUNG),
        ("exit-code", False, 25.0, start.STARTS_MAX, start.NEVER_READY),  # a busy machine
        ("signal", True, 2.0, start.STARTS_MAX, start.CANNOT_STAY_UP),
    ],
)
def test_an_agent_that_never_gets_to_work_is_counted(
    systemd: Systemd, folder: Path, monkeypatch: pytest.MonkeyPatch,
    result: str, ready: bool, seconds: float, times_max: int, reason: str,
) -> None:  # fmt: skip
    """systemd started one that hangs again each 15 minutes, and one that fails each 25 s, for ever."""
    clock = itertools.count(1000.0, seconds)
    monkeypatch.setattr(start.time, "monotonic", lambda: next(clock))
    for _ in range(times_max):
        assert COUNT_IT not in systemd.argvs
        ends(monkeypatch, folder, result, ready)
    assert systemd.argvs.count(COUNT_IT) == 1
    assert FailedUnit(folder.parent).reason() == f"{reason}; it last said: last words"
    ends(monkeypatch, folder, result, ready)
    assert systemd.argvs.count(COUNT_IT) == 1, "what could not be counted is not told at once again"


@pytest.mark.parametrize(
    ("result", "ready", "seconds"),
    [
        ("success", True, 1.0),  # a stop or a restart by a person or a package
        ("success", False, 1.0),
        ("timeout", True, 1.0),  # a stop that took too long
        ("exit-code", True, 25.0),  # now and then, with work between
    ],
)
def test_an_agent_that_works_or_was_stopped_is_not_counted(
    systemd: Systemd, folder: Path, monkeypatch: pytest.MonkeyPatch, result: str, ready: bool, seconds: float
) -> None:
    """`systemctl stop` of an agent that then ended with an error switched the machine off."""
    clock = itertools.count(1000.0, seconds)
    monkeypatch.setattr(start.time, "monotonic", lambda: next(clock))
    for _ in range(start.STARTS_MAX + 5):
        ends(monkeypatch, folder, result, ready)
    assert COUNT_IT not in systemd.argvs


def test_an_agent_that_handed_over_has_not_failed() -> None:
    assert f"SuccessExitStatus={int(ExitCode.INTERRUPTED)}\n" in userdata.unit()


@pytest.mark.parametrize("path", ["/dltraining", "/a-b/c_d", "/.x/y.z", "/a//b/", "/a/./b-"])
def test_the_name_of_a_mount_is_what_systemd_says(path: str) -> None:
    if shutil.which("systemd-escape") is None:
        pytest.skip("systemd-escape is not installed")
    argv = ["systemd-escape", "--path", "--suffix=mount", path]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    assert said == start.mount_unit(path)


def test_an_installation_that_a_reboot_cut_short_goes_on(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    (tmp_path / "units").mkdir()
    monkeypatch.setattr(bootstrap, "ROOT", "")
    monkeypatch.setattr(bootstrap, "UNITS", f"{tmp_path}/units/")
    monkeypatch.setattr(bootstrap.os, "getuid", lambda: 0)
    monkeypatch.setattr(bootstrap.os.path, "isdir", lambda path: path == "/run/systemd/system")
    monkeypatch.setattr(bootstrap.subprocess, "run", lambda argv, **_: asked.append(argv))
    bootstrap.go_on_after_reboot("a" * 64)
    text = (tmp_path / "units/spotheal-install.service").read_text()
    assert f"ExecStart={sys.executable} -EsB {bootstrap.HOME}/bootstrap.py {'a' * 64}\n" in text
    assert "ConditionPathExists=!/etc/systemd/system/multi-user.target.wants/spotheal-agent.service\n" in text
    assert asked == [["systemctl", "enable", "spotheal-install.service"]]


@pytest.mark.parametrize(("mode", "root", "made"), [("on", "", 1), ("imds", "", 1), ("off", "", 0), ("on", "/x", 0)])
def test_the_trainers_user_is_made_only_where_the_machine_is_ours(
    monkeypatch: pytest.MonkeyPatch, mode: str, root: str, made: int
) -> None:
    argvs: list[list[str]] = []
    monkeypatch.setattr(start, "ROOT", root)
    monkeypatch.setattr(start.os, "getuid", lambda: 0)
    monkeypatch.setattr(start.subprocess, "run", lambda argv, **_: argvs.append(argv))
    start.make_user({"mode": mode, "user": "nobody-has-this-name"})
    assert [argv[0] for argv in argvs] == ["useradd"] * made


# ------------------------------------------------------------------------------------------------------------- the unit
def test_the_unit_starts_the_agent_again_unless_it_ended_for_good() -> None:
    lines = userdata.unit().splitlines()
    assert {"Restart=always", "RestartPreventExitStatus=0", "KillMode=mixed"} < set(lines)
    assert "TimeoutStopSec=110" in lines
    assert {"OOMPolicy=continue", "TasksMax=infinity"} < set(lines), "what a trainer takes up is not the agent's end"
    (after,) = [line for line in lines if line.startswith("After=")]
    assert "network-online.target" in after
    assert "cloud" not in after, "user data runs inside cloud-final.service and would wait for itself"
    (start,) = [line for line in lines if line.startswith("ExecStart=")]
    assert start == f"ExecStart={' '.join(_agent_argv())}"


def _agent_argv() -> list[str]:
    home = "/opt/spotheal"
    return [f"{home}/agent/bin/python", "-I", "-m", "spotheal.agent", "run", "--config", f"{home}/config.json"]


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "spotheal-agent.service"
    unit.write_text(userdata.unit().replace(_agent_argv()[0], "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
