"""Checkout of real repositories, `setup`, `keep` and the choice of the interpreter."""

from __future__ import annotations

import http.server
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from spotheal.agent.files.folders import Folders
from spotheal.agent.processes import programs
from spotheal.agent.processes.account import trainer_account
from spotheal.agent.processes.foreign_command import Surroundings
from spotheal.agent.protocol.clock import Stop, SystemClock, never
from spotheal.agent.protocol.errors import Interrupted, NotFound, Retryable, SetupFailed
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job import parse_job
from spotheal.agent.protocol.names import LAYOUT, StoreUrl
from spotheal.agent.repository import git_faults
from spotheal.agent.repository.checkout import checkout
from spotheal.agent.repository.git_faults import Cause, classify, redacted, without_credentials
from spotheal.agent.repository.working_copy import link_kept
from spotheal.agent.trainer.interpreter import Interpreter, find_interpreter, probe
from spotheal.agent.trainer.setup import key_of, prepare

pytestmark = pytest.mark.processes
LOG = structlog.get_logger()
MISSING = "0123456789" * 4
PYTHON = Path(sys.executable)


class HurriedClock(SystemClock):
    """Remembers what was to be slept, moves its own time on by it, and sleeps at most a fiftieth of a second."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self._ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self._ahead

    def sleep(self, seconds: float, until: Stop | None = None) -> bool:
        if seconds >= 1:
            self.slept.append(seconds)
            self._ahead += seconds
        return super().sleep(min(seconds, 0.02), until)


def git(folder: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always"]
    ended = subprocess.run(["git", *settings, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return ended.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with two commits and a hook that would leave a trace."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    (folder / "train.py").write_text("print('first')\n")
    git(folder, "add", "train.py")
    git(folder, "commit", "--quiet", "-m", "first")
    (folder / "train.py").write_text("print('second')\n")
    git(folder, "commit", "--quiet", "-am", "second")
    return folder


def configured(repository: object, revision: str, **job: Any) -> InstanceConfig:
    document = {"job": {"name": "j", "repository": str(repository), "command": ["python", "train.py"], **job}}
    return InstanceConfig(parse_job(document), "run", "us-west-2", StoreUrl("bucket", "j/run"), revision)


def clone(config: InstanceConfig, target: Path, **more: Any) -> Path:
    return checkout(config, target, **{"clock": HurriedClock(), "log": LOG, **more})


# ---------------------------------------------------------------------------------------------------------- where from
@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_a_clone_is_at_the_pinned_commit_and_not_at_the_newest(repository: Path, tmp_path: Path, form: str) -> None:
    first = git(repository, "rev-parse", "HEAD~1")
    target = clone(configured(form.format(repository), first), tmp_path / "src")
    assert (target / "train.py").read_text() == "print('first')\n"
    assert git(target, "rev-parse", "HEAD") == first


def test_a_commit_that_is_on_no_branch_any_more_is_still_found(repository: Path, tmp_path: Path) -> None:
    second = git(repository, "rev-parse", "HEAD")
    git(repository, "reset", "--quiet", "--hard", "HEAD~1")
    target = clone(configured(repository, second), tmp_path / "src")
    assert (target / "train.py").read_text() == "print('second')\n"


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_clone_is_made_by_the_trainers_user_also_of_a_repository_of_anothers() -> None:
    account = trainer_account("nobody")
    if account is None:
        pytest.skip("this machine has no user nobody")
    root = Path(tempfile.mkdtemp(prefix="spotheal-test-"))  # pytest's own folders are closed to others
    try:
        root.chmod(0o755)
        (root / "repository").mkdir()
        git(root / "repository", "init", "--quiet")
        git(root / "repository", "commit", "--quiet", "--allow-empty", "-m", "empty")
        revision = git(root / "repository", "rev-parse", "HEAD")
        target = clone(configured(root / "repository", revision), root / "lib/src", account=account)
        assert {path.stat().st_uid for path in (target, target / ".git", target / ".git/HEAD")} == {account.uid}
    finally:
        shutil.rmtree(root)


class Bundles:
    """A store that holds one bundle."""

    def __init__(self, bundle: Path, faults: int = 0) -> None:
        self._bundle, self._faults = bundle, faults

    def download(self, key: str, path: Path) -> None:
        if self._faults:
            self._faults -= 1
            raise Retryable("the store is throttled")
        if key != LAYOUT.repository_bundle or not self._bundle.exists():
            raise NotFound(key)
        shutil.copy(self._bundle, path)


def test_a_dot_is_the_commit_carried_in_the_store(repository: Path, tmp_path: Path) -> None:
    git(repository, "bundle", "create", "--quiet", str(tmp_path / "b"), "HEAD")
    revision = git(repository, "rev-parse", "HEAD")
    target = clone(configured(".", revision), tmp_path / "src", store=Bundles(tmp_path / "b", faults=2))
    assert git(target, "rev-parse", "HEAD") == revision
    assert not list(tmp_path.rglob("*.bundle"))


def test_a_dot_without_a_bundle_in_the_store_is_a_setup_failure(tmp_path: Path) -> None:
    with pytest.raises(SetupFailed, match="no git bundle"):
        clone(configured(".", MISSING), tmp_path / "src", store=Bundles(tmp_path / "none"))


def test_a_bundle_file_is_a_repository_too(repository: Path, tmp_path: Path) -> None:
    git(repository, "bundle", "create", "--quiet", str(tmp_path / "b"), "HEAD")
    target = clone(configured(tmp_path / "b", git(repository, "rev-parse", "HEAD")), tmp_path / "src")
    assert (target / "train.py").exists()


def test_a_file_that_is_no_bundle_is_a_setup_failure(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("not a bundle")
    with pytest.raises(SetupFailed, match="bundle cannot be used"):
        clone(configured(tmp_path / "b", MISSING), tmp_path / "src")


def test_submodules_come_along_only_where_they_are_asked_for(repository: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    git(whole, "init", "--quiet")
    git(whole, "submodule", "--quiet", "add", str(repository), "part")
    git(whole, "commit", "--quiet", "-m", "with a part")
    revision = git(whole, "rev-parse", "HEAD")
    assert (clone(configured(whole, revision, submodules=True), tmp_path / "a") / "part/train.py").exists()
    assert not (clone(configured(whole, revision), tmp_path / "b") / "part/train.py").exists()


# --------------------------------------------------------------------------------------------------------- idempotence
def test_a_right_clone_is_left_alone_and_a_broken_one_is_made_anew(repository: Path, tmp_path: Path) -> None:
    config = configured(repository, git(repository, "rev-parse", "HEAD"))
    target = clone(config, tmp_path / "src")
    (target / "output.txt").touch()
    assert (clone(config, target) / "output.txt").exists()
    (tmp_path / "src.json").unlink()  # as if it had been cut short
    assert not (clone(config, target) / "output.txt").exists()


def test_another_revision_replaces_the_clone(repository: Path, tmp_path: Path) -> None:
    clone(configured(repository, git(repository, "rev-parse", "HEAD")), tmp_path / "src")
    target = clone(configured(repository, git(repository, "rev-parse", "HEAD~1")), tmp_path / "src")
    assert (target / "train.py").read_text() == "print('first')\n"


# ----------------------------------------------------------------------------------------------------- permanent causes
def test_a_missing_revision_is_a_setup_failure_that_names_it(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(SetupFailed, match=f"no commit {MISSING}") as caught:
        clone(configured(repository, MISSING), tmp_path / "src")
    assert "push it" in caught.value.next_step


def test_a_missing_repository_is_a_setup_failure(tmp_path: Path) -> None:
    with pytest.raises(SetupFailed, match="cannot be cloned"):
        clone(configured(tmp_path / "nothing", MISSING), tmp_path / "src")


@pytest.mark.parametrize(
    "hostile",
    ["ext::sh -c touch% {trace}", "--upload-pack=touch {trace}", "fd::7", "EXT::sh -c touch% {trace}", "ftp://h/r",
     " /leading", "transport-helper::https://h"],
)  # fmt: skip
def test_a_hostile_repository_never_reaches_git(hostile: str, tmp_path: Path) -> None:
    with pytest.raises(SetupFailed, match="correct it in job"):
        clone(configured(hostile.format(trace=tmp_path / "trace"), MISSING), tmp_path / "src")
    assert not (tmp_path / "trace").exists()
    assert not (tmp_path / "src").exists()


def test_an_ssh_host_that_is_an_option_is_refused_by_git(tmp_path: Path) -> None:
    url = f"ssh://-oProxyCommand=touch%20{tmp_path}/trace/x"
    with pytest.raises((SetupFailed, Retryable)):
        clone(configured(url, MISSING), tmp_path / "src", network_seconds_max=2)
    assert not (tmp_path / "trace").exists()


def test_a_submodule_with_a_hostile_url_runs_nothing(repository: Path, tmp_path: Path) -> None:
    text = f'[submodule "p"]\n\tpath = p\n\turl = "ext::sh -c touch% {tmp_path}/trace"\n'
    (repository / ".gitmodules").write_text(text)
    head = git(repository, "rev-parse", "HEAD")
    git(repository, "update-index", "--add", "--cacheinfo", f"160000,{head},p")
    git(repository, "add", ".gitmodules")
    git(repository, "commit", "--quiet", "-m", "hostile")
    with pytest.raises(SetupFailed):
        clone(configured(repository, git(repository, "rev-parse", "HEAD"), submodules=True), tmp_path / "src")
    assert not (tmp_path / "trace").exists()


def test_no_hook_of_the_machine_runs(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = tmp_path / "template/hooks"
    hooks.mkdir(parents=True)
    (hooks / "post-checkout").write_text(f"#!/bin/sh\ntouch {tmp_path}/trace\n")
    (hooks / "post-checkout").chmod(0o755)
    (tmp_path / ".gitconfig").write_text(
        f"[init]\n\ttemplateDir = {tmp_path}/template\n[core]\n\thooksPath = {hooks}\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    clone(configured(repository, git(repository, "rev-parse", "HEAD")), tmp_path / "src")
    assert not (tmp_path / "trace").exists()


SMUDGE = """
[core]
	attributesFile = {0}/attributes
[filter "x"]
	smudge = "touch {0}/trace; cat"
"""


def test_git_with_a_secret_reads_no_configuration_that_a_trainer_wrote(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A filter in ~/.gitconfig ran beside the secret and printed it (audit of 2026-11-22, S3)."""
    homes = [tmp_path / "home", tmp_path / "src.home", tmp_path]
    for home in homes:
        (home / "git").mkdir(parents=True, exist_ok=True)
        for name in (".gitconfig", "git/config"):
            (home / name).write_text(SMUDGE.format(tmp_path))
    (tmp_path / "attributes").write_text("* filter=x\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    clone(configured(repository, git(repository, "rev-parse", "HEAD")), tmp_path / "src", secret="ghp_0123456789")
    assert not (tmp_path / "trace").exists()


def test_a_new_clone_with_a_secret_uses_nothing_of_the_one_before(repository: Path, tmp_path: Path) -> None:
    config = configured(repository, git(repository, "rev-parse", "HEAD"))
    target = clone(config, tmp_path / "src", secret="ghp_0123456789")
    (target / ".git/config").unlink()
    (tmp_path / "of-root").write_text("root's own")
    (target / ".git/config").symlink_to(tmp_path / "of-root")
    (tmp_path / "src.home/.gitconfig").write_text(SMUDGE.format(tmp_path))
    (tmp_path / "src.json").unlink()
    clone(config, tmp_path / "src", secret="ghp_0123456789")
    assert (tmp_path / "of-root").read_text() == "root's own"
    assert list((tmp_path / "src.home").iterdir()) == []


# --------------------------------------------------------------------------------------------------------- the network
class Refusing(http.server.BaseHTTPRequestHandler):
    """A git host that answers every request with the status of its class."""

    status = 403

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return None


@pytest.fixture
def host() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://bob:hunter2@127.0.0.1:{server.server_port}/r.git"
    server.shutdown()
    server.server_close()


def closed_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_an_unreachable_host_is_tried_again_with_growing_pauses_and_is_no_setup_failure(tmp_path: Path) -> None:
    clock = HurriedClock()
    config = configured(f"http://127.0.0.1:{closed_port()}/r.git", MISSING)
    with pytest.raises(Retryable, match="could not be reached for 20 s"):
        clone(config, tmp_path / "src", clock=clock, network_seconds_max=20)
    assert clock.slept == [1, 2, 4, 8]


def test_a_stop_ends_the_waiting_for_the_network(tmp_path: Path) -> None:
    stop = threading.Event()
    clock = HurriedClock()
    clock.sleep = lambda seconds, until=None: stop.set() if seconds >= 1 else SystemClock().sleep(0.01, until)  # type: ignore
    with pytest.raises(Interrupted):
        clone(configured(f"http://127.0.0.1:{closed_port()}/r", MISSING), tmp_path / "src", clock=clock, stop=stop)


@pytest.mark.parametrize(
    ("status", "error"), [(403, SetupFailed), (401, SetupFailed), (404, SetupFailed), (503, Retryable)]
)
def test_what_a_host_answers_decides_whether_it_is_asked_again(
    host: str, tmp_path: Path, status: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Refusing, "status", status)
    with pytest.raises(error) as caught:
        clone(configured(host, MISSING), tmp_path / "src", network_seconds_max=2)
    assert "hunter2" not in str(caught.value)


def test_no_password_is_logged_nor_seen_in_an_argv(host: str, tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logged, pytest.raises(SetupFailed):
        clone(configured(host, MISSING), tmp_path / "src")
    assert "hunter2" not in str(logged)
    assert "http://***@127.0.0.1" in str(logged)


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("ssh: Could not resolve hostname h: Name or service not known\nfatal: Could not read from remote repository.\n"
         "\nPlease make sure you have the correct access rights\nand the repository exists.", Cause.NETWORK),
        ("fatal: unable to access 'https://h/r/': Could not resolve host: h", Cause.NETWORK),
        ("error: RPC failed; curl 56 GnuTLS recv error\nfatal: early EOF", Cause.NETWORK),
        ("fatal: unable to access 'https://h/r/': The requested URL returned error: 502", Cause.NETWORK),
        ("git@h: Permission denied (publickey).\nfatal: Could not read from remote repository.\n\nPlease make sure you "
         "have the correct access rights\nand the repository exists.", Cause.PERMANENT),
        ("remote: Support for password authentication was removed\nfatal: Authentication failed for 'https://h/r/'",
         Cause.PERMANENT),
        ("fatal: could not read Username for 'https://h': terminal prompts disabled", Cause.PERMANENT),
        ("remote: Repository not found.\nfatal: repository 'https://h/r/' not found", Cause.PERMANENT),
        ("Host key verification failed.\nfatal: Could not read from remote repository.", Cause.PERMANENT),
        ("fatal: remote error: upload-pack: not our ref 0123", Cause.NO_SUCH_COMMIT),
        ("error: Server does not allow request for unadvertised object 0123", Cause.NO_SUCH_COMMIT),
        ("fatal: dumb http transport does not support shallow capabilities", Cause.NO_SUCH_COMMIT),
        ("remote: fatal: unable to read 2d84b35af79e411d73ea7cae83c73964c6ac83b4\nremote: aborting due to possible"
         " repository corruption on the remote side.\nfatal: early EOF\nfatal: fetch-pack: invalid index-pack output",
         Cause.PERMANENT),
        ("fatal: something nobody has seen", Cause.UNKNOWN),
    ],
)  # fmt: skip
def test_git_messages_are_told_apart(said: str, cause: Cause) -> None:
    assert classify(said.splitlines()).cause is cause


def test_credentials_are_taken_out_of_urls() -> None:
    assert redacted("fatal: 'https://u:p@ss@h/r' and https://h/a@b") == "fatal: 'https://***@h/r' and https://h/a@b"
    assert without_credentials("https://u:p@h:8443/r.git") == "https://h:8443/r.git"
    assert without_credentials("ssh://git:p@h/r") == "ssh://git@h/r"
    assert without_credentials("git@h:o/r.git") == "git@h:o/r.git"
    assert git_faults.refusal("git@h:o/r.git") == git_faults.refusal("/path/with::colons") == ""


# ---------------------------------------------------------------------------------------------------------------- setup
@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    folders = Folders.at(tmp_path / "root", "/volume")
    folders.make(None)
    folders.clone.mkdir()
    return folders


@pytest.fixture
def where() -> Surroundings:
    return Surroundings(None, HurriedClock(), never())


@pytest.fixture
def python(folders: Folders, where: Surroundings) -> Interpreter:
    found = probe(Path(sys.executable), folders, where)
    assert found is not None
    return found


def with_setup(*setup: list[str], **job: Any) -> InstanceConfig:
    return configured("/r", MISSING, setup=list(setup), **job)


COUNT = [
    "python",
    "-c",
    "import os,sys; open(os.environ['SPOTHEAL_RESULTS_DIR'] + '/count', 'a').write(sys.prefix + '\\n')",
]


def test_setup_runs_once_in_an_environment_that_sees_the_images_packages(
    folders: Folders, where: Surroundings, python: Interpreter
) -> None:
    code = "import pytest, sys; assert sys.prefix != sys.base_prefix"  # pytest: a package of the base, itself a venv
    config = with_setup(COUNT, ["python", "-c", code], ["pip", "--version"])
    made = prepare(config, folders, python, where, LOG)
    assert prepare(config, folders, python, where, LOG).path == made.path
    assert made.path == folders.environments / f"env-{key_of(config, python)}" / "bin/python"
    assert (folders.results / "count").read_text() == f"{made.path.parent.parent}\n"


def test_pip_in_setup_installs_into_the_environment_and_never_into_the_image(
    folders: Folders, where: Surroundings, python: Interpreter
) -> None:
    info = "spotheal_probe-1.0.dist-info"
    with zipfile.ZipFile(folders.clone / "spotheal_probe-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("spotheal_probe.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: spotheal-probe\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    install = ["pip", "install", "--quiet", "--no-index", "--no-deps", "spotheal_probe-1.0-py3-none-any.whl"]
    made = prepare(with_setup(install, ["python", "-c", "import spotheal_probe"]), folders, python, where, LOG)
    assert list(made.path.parent.parent.rglob("spotheal_probe.py"))
    assert not any(list(Path(site).glob("spotheal_probe*")) for site in python.site)


def test_an_environment_that_was_cut_short_or_is_not_on_the_disk_is_made_anew(
    folders: Folders, where: Surroundings, python: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_setup(COUNT)
    with monkeypatch.context() as patch:
        patch.setattr(programs, "run", lambda argv, **_: programs.Result(1, "", f"{argv[0]}: Input/output error"))
        place = prepare(config, folders, python, where, LOG).path.parent.parent
    assert not (place / "spotheal-complete.json").exists()
    prepare(config, folders, python, where, LOG)
    assert (place / "spotheal-complete.json").exists()
    assert len((folders.results / "count").read_text().splitlines()) == 2


def test_setup_revision_and_interpreter_make_the_key(python: Interpreter) -> None:
    other = Interpreter(python.path, "another build", python.torch, python.is_venv, python.site)
    assert (
        len(
            {
                key_of(with_setup(COUNT), python),
                key_of(with_setup(COUNT, COUNT), python),
                key_of(with_setup(COUNT), other),
            }
        )
        == 3
    )


def test_a_setup_command_that_fails_shows_its_last_20_lines(
    folders: Folders, where: Surroundings, python: Interpreter
) -> None:
    code = "for n in range(30): print('line', n)\nraise SystemExit(3)"
    with pytest.raises(SetupFailed, match="exited with 3") as caught:
        prepare(with_setup(["python", "-c", code]), folders, python, where, LOG)
    assert caught.value.message.splitlines()[1:] == [f"line {n}" for n in range(10, 30)]


def test_a_setup_command_that_the_network_fails_is_tried_again(
    folders: Folders, where: Surroundings, python: Interpreter
) -> None:
    code = (
        "import os,sys; p = os.environ['SPOTHEAL_RESULTS_DIR'] + '/tries';"
        "n = os.path.exists(p) and os.path.getsize(p);"
        "open(p, 'a').write('x'); print('Temporary failure in name resolution'); sys.exit(n < 2)"
    )
    prepare(with_setup(["python", "-c", code]), folders, python, where, LOG)
    assert (folders.results / "tries").read_text() == "xxx"


def test_a_stop_ends_setup_and_leaves_no_process(folders: Folders, python: Interpreter) -> None:
    stop = threading.Event()
    where = Surroundings(None, SystemClock(), stop)
    code = (
        "import os,time; open(os.environ['SPOTHEAL_RESULTS_DIR'] + '/pid', 'w').write(str(os.getpid())); time.sleep(60)"
    )

    def stop_when_it_runs() -> None:
        while not (folders.results / "pid").exists() or not (folders.results / "pid").read_text():
            SystemClock().sleep(0.01)
        stop.set()

    threading.Thread(target=stop_when_it_runs).start()
    with pytest.raises(Interrupted):
        prepare(with_setup(["python", "-c", code]), folders, python, where, LOG)
    assert not os.path.exists(f"/proc/{(folders.results / 'pid').read_text()}")


def test_a_python_that_is_not_there_is_a_setup_failure(folders: Folders, where: Surroundings) -> None:
    with pytest.raises(SetupFailed, match="no-such-python"):
        find_interpreter(configured("/r", MISSING, python="no-such-python"), folders, where, LOG)


def test_the_first_python_that_can_import_torch_is_used(
    folders: Folders, where: Surroundings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, torch in (("without", ""), ("with", "2.13.0")):
        program = tmp_path / name / "bin/python"
        program.parent.mkdir(parents=True)
        said = f'{{"version": "3", "torch": "{torch}", "venv": false, "site": []}}'
        program.write_text(f"#!/bin/sh\necho '{said}'\n")
        program.chmod(0o755)
    monkeypatch.setattr(
        "spotheal.agent.trainer.interpreter.candidates",
        lambda: [tmp_path / name / "bin/python" for name in ("without", "with")],
    )
    assert find_interpreter(configured("/r", MISSING), folders, where, LOG).path == tmp_path / "with/bin/python"


# ----------------------------------------------------------------------------------------------------------------- keep
@pytest.fixture
def container(folders: Folders) -> Folders:
    """As on AWS Batch: the trainer runs in the clone itself."""
    folders.clone.rmdir()
    folders.fetched.mkdir()
    return replace(folders, clone=folders.fetched)


def test_a_kept_path_survives_a_new_clone(container: Folders, where: Surroundings) -> None:
    def new_clone() -> None:
        shutil.rmtree(container.clone)
        (container.clone / "runs").mkdir(parents=True)
        (container.clone / "runs/settings.yaml").write_text("of the clone")
        link_kept(["runs", "deep/er/log.csv"], container, where, PYTHON)

    new_clone()
    assert (container.clone / "runs/settings.yaml").read_text() == "of the clone"
    (container.clone / "runs/settings.yaml").write_text("of the trainer")
    (container.clone / "runs/model.pt").write_text("weights")
    (container.clone / "deep/er/log.csv").write_text("1,2")
    new_clone()
    assert (container.clone / "runs/settings.yaml").read_text() == "of the trainer"
    assert (container.clone / "runs/model.pt").read_text() == "weights"
    assert (container.clone / "deep/er/log.csv").read_text() == "1,2"
    link_kept(["runs", "deep/er/log.csv"], container, where, PYTHON)


def test_a_save_over_a_kept_link_outlives_a_restart_of_the_agent(
    repository: Path, container: Folders, where: Surroundings
) -> None:
    """The clone is whole on the same boot, so the script's file stands where the link was."""
    config = configured(str(repository), git(repository, "rev-parse", "HEAD"))

    def start() -> None:
        checkout(config, container.fetched, clock=SystemClock(), log=LOG)
        link_kept(["last.pt", "train.py"], container, where, PYTHON)

    def save(text: str) -> None:
        (container.clone / "new").write_text(text)
        (container.clone / "new").replace(container.clone / "last.pt")

    start()
    (container.clone / "train.py").write_text("of the script")
    for text in ("first save", "second save"):
        save(text)
        start()
        assert (container.clone / "last.pt").is_symlink()
        assert (container.clone / "last.pt").read_text() == text
    assert (container.keep / "last.pt.spotheal").read_text() == "first save"
    shutil.rmtree(container.clone)
    (container.fetched.parent / "src.json").unlink()
    start()
    assert (container.clone / "train.py").read_text() == "of the script"


def test_a_kept_path_inside_another_needs_no_link_of_its_own(container: Folders, where: Surroundings) -> None:
    link_kept(["a/b", "a"], container, where, PYTHON)
    assert (container.clone / "a").is_symlink()


def test_a_kept_path_that_leads_out_of_the_clone_by_a_link_is_refused(
    container: Folders, where: Surroundings, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (container.clone / "out").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SetupFailed, match="leads out"):
        link_kept(["out/of/passwd"], container, where, PYTHON)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_link_that_a_trainer_left_on_the_volume_is_never_followed(
    container: Folders, where: Surroundings, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (container.keep / "runs").symlink_to(tmp_path / "elsewhere")
    (container.clone / "runs").mkdir()
    (container.clone / "runs/planted").touch()
    link_kept(["runs"], container, where, PYTHON)
    assert list((tmp_path / "elsewhere").iterdir()) == []
