"""The training repository at its pinned commit, fetched as the trainer's user: nothing of it runs here.

git reads no file that a trainer could have written (audit of 2026-11-22, S3: a filter in ~/.gitconfig printed the
secret): each fetch has a new folder and an empty HOME, and the configuration of neither user nor system.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from spotheal.agent.files import untrusted_folders
from spotheal.agent.files.folders import publish
from spotheal.agent.processes import programs
from spotheal.agent.processes.account import Account
from spotheal.agent.processes.environment import base_environment
from spotheal.agent.processes.foreign_command import Finished, Surroundings, run_command
from spotheal.agent.protocol import bounded_json
from spotheal.agent.protocol.clock import Clock, Stop, never
from spotheal.agent.protocol.errors import NotFound, Retryable, SetupFailed
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.names import LAYOUT
from spotheal.agent.protocol.retry_budget import Patience
from spotheal.agent.protocol.retrying import Passing, back_off, until_it_works
from spotheal.agent.repository.git_access import SSH, GitAccess, access
from spotheal.agent.repository.git_faults import Cause, Fault, classify, redacted, refusal, without_credentials

COMMAND_SECONDS_MAX = 1800.0
NETWORK_SECONDS_MAX = 1800.0  # how long a network that is down is waited for
_UNKNOWN_TRIES = 3
T = TypeVar("T")
_CONFIG_SECONDS = 20.0
_MARKER_BYTES_MAX = 1 << 16
_LFS = r"^filter\.lfs\."  # of the system's configuration: all that is taken from it
_OPTIONS = (
    # No code of the repository or of the machine's templates runs, no remote helper, no background process.
    "-c", "core.hooksPath=/dev/null", "-c", "protocol.ext.allow=never", "-c", "protocol.fd.allow=never",
    "-c", "gc.auto=0", "-c", "maintenance.auto=false", "-c", "core.fsmonitor=false", "-c", "advice.detachedHead=false",
    # A connection that delivers less than 1 kB/s for a minute is dead.
    "-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=60",
)  # fmt: skip


class Download(Protocol):
    """What of `store.Store` a checkout needs."""

    def download(self, key: str, path: Path) -> None: ...


def checkout(
    config: InstanceConfig,
    target: Path,
    *,
    clock: Clock,
    log: Any,
    store: Download | None = None,
    account: Account | None = None,
    stop: Stop | None = None,
    network_seconds_max: float = NETWORK_SECONDS_MAX,
    secret: str = "",
    private: Path | None = None,
) -> Path:
    """Clone `config`'s repository at its commit into `target`, once a boot; what is right already is left alone.

    The folder that holds `target` is the agent's own: it has the mark of a complete clone and git's HOME. `secret`: a
    token or `user:password` for https, a private key for ssh; it lies below `private` while git runs.
    Raises SetupFailed where trying again cannot help (access, no such repository or commit), Retryable where the
    network was down for `network_seconds_max`, Interrupted at `stop`.
    """
    job = config.job.job
    fault = refusal(job.repository) if job.repository != "." else ""
    if fault:
        raise SetupFailed(f"the repository {redacted(job.repository)!r} {fault}", next_step="correct it in job.toml")
    surroundings = Surroundings(_confined(account, target), clock, stop or never())
    keys = private or target.parent / "private"
    with access(secret, job.repository, keys, account, job.known_hosts) as settings:
        alone = account is not None or bool(secret)
        return _clone(config, target, surroundings, log, store, network_seconds_max, settings, alone)


def _clone(
    config: InstanceConfig,
    target: Path,
    surroundings: Surroundings,
    log: Any,
    store: Download | None,
    network_seconds_max: float,
    settings: GitAccess,
    alone: bool,
) -> Path:
    job = config.job.job
    source = {**source_of(config), "boot": _boot()}
    if _is_complete(target, source):
        log.info("the clone is there already", revision=config.revision)
        return target
    log.info("cloning", repository=redacted(job.repository), revision=config.revision)
    for folder in (target, _home(target)):
        _make_empty(folder, surroundings.account)
    git = _Git(surroundings, target, job.repository, log, settings, alone)
    git.do("init", "--quiet", "--template=", ".")
    retry = _Retry(surroundings, log, network_seconds_max, redacted(job.repository))
    if job.repository == ".":
        _unbundle_from_store(git, config, target, store, retry)
    elif os.path.isfile(job.repository):
        _unbundle(git, Path(job.repository))
    else:
        _fetch(git, config.revision, retry)
    _check_out(git, config, retry)
    git.forget_credentials()
    publish(_mark(target), json.dumps(source))
    log.info("cloned", revision=config.revision)
    return target


def source_of(config: InstanceConfig) -> dict[str, Any]:
    """What a clone is made of: equal where it would come out equal."""
    job = config.job.job
    repository = without_credentials(job.repository)
    return {"revision": config.revision, "repository": repository, "submodules": job.submodules}


# ------------------------------------------------------------------------------------------------------------- fetching
def _fetch(git: _Git, revision: str, retry: _Retry) -> None:
    """The commit alone where the server gives it, else everything."""
    git.name_remote()
    fault = retry.until_done(lambda: git.run("fetch", "--quiet", "--no-tags", "--depth=1", "origin", revision))
    if fault is None:
        return
    if fault.cause is Cause.NO_SUCH_COMMIT:
        everything = ("+refs/heads/*:refs/remotes/origin/*", "+refs/tags/*:refs/tags/*")
        fault = retry.until_done(lambda: git.run("fetch", "--quiet", "origin", *everything))
    if fault is not None:
        raise _setup_failed(git, fault)


def _unbundle_from_store(
    git: _Git, config: InstanceConfig, target: Path, store: Download | None, retry: _Retry
) -> None:
    if store is None:
        raise SetupFailed(
            'repository = "." needs the run\'s store', next_step="start the agent with the store of the run"
        )
    bundle = target.with_name(f"{target.name}.bundle")
    try:
        retry.until_fetched(lambda: store.download(LAYOUT.repository_bundle, bundle))
    except NotFound as error:
        raise SetupFailed(
            f"the store has no git bundle at {LAYOUT.repository_bundle}",
            next_step="run `fleetctl request` again from the checkout, which uploads it",
        ) from error
    bundle.chmod(0o644)
    _unbundle(git, bundle)
    bundle.unlink()


def _unbundle(git: _Git, bundle: Path) -> None:
    ended = git.run("bundle", "unbundle", str(bundle))
    if not ended.ok:
        fault = classify(ended.lines, timed_out=ended.timed_out)
        raise SetupFailed(
            f"the git bundle cannot be used: {fault.message}",
            next_step="make it with the whole history: `git bundle create FILE HEAD`; `fleetctl request` does",
        )


def _check_out(git: _Git, config: InstanceConfig, retry: _Retry) -> None:
    if not git.run("cat-file", "-e", config.revision + "^{commit}").ok:
        raise SetupFailed(
            f"the repository {git.shown} has no commit {config.revision}",
            next_step="push it, then run `fleetctl request` again, which pins `revision` to a commit that is there",
        )
    # A filter (git-lfs) may go to the network here.
    fault = retry.until_done(lambda: git.run("checkout", "--quiet", "--force", "--detach", config.revision))
    if fault is None and config.job.job.submodules:
        update = ("submodule", "--quiet", "update", "--init", "--recursive", "--force")
        fault = retry.until_done(lambda: git.run(*update, "--depth=1"))
        if fault is not None and fault.cause is not Cause.PERMANENT:
            fault = retry.until_done(lambda: git.run(*update))
    if fault is not None:
        raise _setup_failed(git, fault)


def _setup_failed(git: _Git, fault: Fault) -> SetupFailed:
    return SetupFailed(
        f"the repository {git.shown} cannot be cloned: {redacted(fault.message)}",
        next_step=fault.next_step or "try `git clone` of the same URL by hand on such an instance",
    )


@dataclass
class _Retry:
    """Waits out a network that is down, for at most `seconds_max` in all, and cut short by the stop."""

    where: Surroundings
    log: Any
    seconds_max: float
    shown: str

    def __post_init__(self) -> None:
        self._until = self.where.clock.monotonic() + self.seconds_max

    def until_done(self, command: Callable[[], Finished]) -> Fault | None:
        """Run `command` until it succeeds (None) or fails for a cause that waiting does not cure."""
        unknown = 0

        def once() -> Fault | None:
            nonlocal unknown
            ended = command()
            if ended.ok:
                return None
            fault = classify(ended.lines, timed_out=ended.timed_out)
            unknown += fault.cause is Cause.UNKNOWN
            if fault.cause not in (Cause.NETWORK, Cause.UNKNOWN) or unknown >= _UNKNOWN_TRIES:
                return fault
            raise Retryable(redacted(fault.message))

        return self._patiently(once)

    def until_fetched(self, download: Callable[[], object]) -> None:
        """PermissionDenied where rights are refused for as long as healing bears it."""
        self._patiently(download, Patience(self.where.clock, self.seconds_max).bears)

    def _patiently(self, act: Callable[[], T], passes: Passing = Retryable) -> T:
        try:
            return until_it_works(
                act, self.where.clock, pause=back_off, passes=passes, stop=self.where.stop,
                seconds_max=self._until - self.where.clock.monotonic(),
                log=self.log, line="the repository cannot be reached; trying again",
            )  # fmt: skip
        except Retryable as error:
            raise Retryable(
                f"the repository {self.shown} could not be reached for {self.seconds_max:.0f} s: {error.message}",
                next_step="check the subnet's route to the internet, its DNS, and the repository's host",
            ) from error


class _Git:
    """git in one clone, as the trainer's user: argv only, no prompts, English messages, no credentials in an argv."""

    def __init__(
        self, surroundings: Surroundings, target: Path, repository: str, log: Any, access: GitAccess, alone: bool
    ) -> None:
        """`alone`: with no configuration but ours. Else (a rehearsal) git clones with what the operator's can."""
        self._where, self._target, self._log, self._access = surroundings, target, log, access
        self._repository = repository
        self.shown = redacted(repository)
        variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        self._environment = base_environment(variables, surroundings.account, _home(target))
        self._filters = _filters_of_system() if alone else ()
        local = ("://" not in repository and ":" not in repository.partition("/")[0]) or repository.startswith("file:")
        self._environment |= {
            "LC_ALL": "C",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ASKPASS": "",
            "SSH_ASKPASS": "",
            "GIT_SSH_COMMAND": access.ssh or os.environ.get("GIT_SSH_COMMAND", SSH),
            # Also for submodules, whose URLs the repository chooses: files only where it is a local one itself.
            "GIT_ALLOW_PROTOCOL": "https:http:ssh:git" + (":file" if local else ""),
            "GIT_PROTOCOL_FROM_USER": "1",
        }
        if alone:
            self._environment = {name: value for name, value in self._environment.items() if name[:4] != "XDG_"}
            self._environment |= {
                "HOME": str(_home(target)),
                "GIT_CONFIG_GLOBAL": os.devnull,
                "GIT_CONFIG_NOSYSTEM": "1",
                "GIT_ATTR_NOSYSTEM": "1",
            }
        if local:
            self._environment["GIT_CONFIG_GLOBAL"] = str(self._trusting_config(alone))

    def _trusting_config(self, alone: bool) -> Path:
        """A configuration that lets git read a local repository of another user: the operator has named it.

        git refuses otherwise ("dubious ownership"), in a container with a mounted checkout for instance, and takes
        this setting from such a file alone.
        """
        file = self._target.parent / "gitconfig"
        file.parent.mkdir(parents=True, exist_ok=True)
        publish(file, ("" if alone else "[include]\n\tpath = ~/.gitconfig\n") + "[safe]\n\tdirectory = *\n")
        return file

    def run(self, *arguments: str) -> Finished:
        try:
            return run_command(
                ["git", *_OPTIONS, *self._filters, *self._access.options, *arguments],
                self._where,
                directory=self._target,
                environment=self._environment,
                seconds_max=COMMAND_SECONDS_MAX,
                on_line=lambda line: self._log.info("git: " + redacted(line)),
            )
        except FileNotFoundError as error:
            raise SetupFailed(
                "git is not installed on this machine",
                next_step="use an AMI with git, such as AWS's deep learning AMIs",
            ) from error

    def do(self, *arguments: str) -> None:
        """Run what can fail only for reasons of this machine."""
        ended = self.run(*arguments)
        if not ended.ok:
            raise _setup_failed(self, classify(ended.lines, timed_out=ended.timed_out))

    def name_remote(self) -> None:
        """Call the repository `origin`, by the configuration file: an argv is readable for every user."""
        self._set_origin(self._repository)

    def forget_credentials(self) -> None:
        """Leave an `origin` that the trainer may read."""
        if "://" in self._repository:
            self._set_origin(without_credentials(self._repository))

    def _set_origin(self, url: str) -> None:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        quoted = url.replace("\\", "\\\\").replace('"', '\\"')
        with (
            untrusted_folders.folder(self._target, ".git") as git,
            open(os.open("config", flags, dir_fd=git), "r+") as file,
        ):
            os.fchmod(file.fileno(), 0o600)
            text = re.sub(r'\[remote "origin"\]\n(\t.*\n)*', "", file.read())
            file.seek(0)
            file.truncate()
            file.write(f'{text}[remote "origin"]\n\turl = "{quoted}"\n')


def _filters_of_system() -> tuple[str, ...]:
    """git-lfs as the machine image has set it up: without it large files would be pointers of 130 bytes."""
    if not programs.exists("git"):
        return ()
    listed = programs.run(["git", "config", "--system", "--null", "--get-regexp", _LFS], seconds_max=_CONFIG_SECONDS)
    settings = [entry.partition("\n")[::2] for entry in listed.out.split("\0") if entry]
    return tuple(word for name, value in settings for word in ("-c", f"{name}={value}"))


# ------------------------------------------------------------------------------------------------------------ the clone
def _mark(target: Path) -> Path:
    return target.with_name(f"{target.name}.json")


def commit_record(target: Path) -> Path:
    """Where the content of the commit's files is recorded, for as long as this clone is there."""
    return target.with_name(f"{target.name}.files.json")


def _home(target: Path) -> Path:
    return target.with_name(f"{target.name}.home")


def _is_complete(target: Path, source: dict[str, Any]) -> bool:
    try:
        with open(os.open(_mark(target), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            return bool(bounded_json.parse_object(file.read(_MARKER_BYTES_MAX)) == source)
    except (OSError, ValueError):
        return False


def _make_empty(folder: Path, account: Account | None) -> None:
    """A new folder of the account's own."""
    for record in (_mark(folder), commit_record(folder)):
        record.unlink(missing_ok=True)
    untrusted_folders.remove(folder)
    folder.mkdir(parents=True)
    if account is not None:
        os.chown(folder, account.uid, account.gid)


def _confined(account: Account | None, target: Path) -> Account | None:
    """git may write its clone and its HOME, and nothing that a trainer reads or writes."""
    if account is None or account.sandbox is None:
        return account
    return replace(account, sandbox=replace(account.sandbox, writable=(target, _home(target))))


def _boot() -> str:
    """Which boot this is; "" where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
