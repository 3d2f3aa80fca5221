"""The commit that a run trains: resolved now, so that every instance clones the same commit.

Work that the instances could not get (uncommitted, unpushed) is refused before anything is created. git is run with
argument lists, never asks for a password, and may not use transports that run commands.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from spotheal.agent.protocol.errors import ConfigError, Conflict, NotFound, PermissionDenied, Retryable
from spotheal.agent.protocol.job import JobConfig
from spotheal.fleet.files.config import is_job_file
from spotheal.fleet.request.script import script_of

HERE = "."
GIT_SECONDS_MAX = 60.0
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_URL = re.compile(r"(?:https?|ssh|git)://[^\s]+")
_SCP = re.compile(r"(?:[\w.-]+@)?[\w.-]+:(?!//)[^\s:]\S*")
_PERMISSION = (
    "Permission denied",
    "Authentication failed",
    "could not read Username",
    "could not read Password",
    "HTTP 403",
    "error: 403",
    "error: 401",
    "terminal prompts disabled",
    "Host key verification failed",
)
# New files of these kinds are most likely a forgotten `git add`.
_CODE = {
    ".py",
    ".sh",
    ".yaml",
    ".yml",
    ".toml",
    ".cfg",
    ".ini",
    ".c",
    ".cpp",
    ".cu",
    ".h",
    ".go",
    ".rs",
    ".jl",
    ".lua",
    ".ipynb",
}
_MISSING = (
    "Repository not found",
    "not found",
    "does not exist",
    "does not appear to be a git repository",
    "error: 404",
)


@dataclass(frozen=True)
class Source:
    """The commit to train. `bundle` is the checkout that it is bundled from; None if instances clone `repository`."""

    repository: str
    commit: str
    ref: str
    bundle: Path | None = None
    warnings: tuple[str, ...] = ()


def resolve(config: JobConfig, folder: Path, *, ours: tuple[Path, ...] = (), allow_paths: bool = False) -> Source:
    """The commit that `[job] repository` and `revision` mean now.

    `folder` is the folder of job.toml; `ours` are files that need no commit (the two of the request). Local paths are
    for rehearsals: no instance could clone them.
    """
    repository, revision = config.job.repository, config.job.revision
    if repository == HERE:
        source = _checkout(folder, revision, ours)
        assert source.bundle is not None
        return replace(source, warnings=(*source.warnings, *_script_notes(config, source.bundle, source.commit)))
    _refuse_address(repository, allow_paths)
    commit, ref = _remote(repository, revision, allow_paths)
    warnings = _compare_with_checkout(repository, revision, commit, ref, folder, ours)
    if (clone := _clone_of(config, folder)) is not None and _commit(clone, commit):
        warnings = (*warnings, *_script_notes(config, clone, commit))
    by_ssh = repository.startswith("ssh:") or _SCP.fullmatch(repository)
    if not allow_paths and by_ssh and not config.job.repository_secret:
        warnings = (
            *warnings,
            "instances have no ssh key of yours; if the repository is private, [job] repository_secret names a deploy"
            ' key, and `repository = "."` carries the commit without one',
        )
    return Source(repository, commit, ref, None, warnings)


def check_script(config: JobConfig, folder: Path) -> list[str]:
    """The check of the script in `resolve`, as far as it works without the network; [] without a local clone."""
    clone = _clone_of(config, folder)
    if clone is None or (commit := _commit(clone, config.job.revision or "HEAD")) is None:
        return []
    return _script_notes(config, clone, commit)


def write_bundle(source: Source, target: Path) -> Path:
    """A git bundle with `source.commit` as its HEAD, from the checkout; it can be cloned without the network."""
    assert source.bundle is not None
    with tempfile.TemporaryDirectory(prefix="spotheal-bundle-") as scratch:
        # A bundle holds refs, not commits; the ref is made in a bare copy that borrows the objects.
        bare = Path(scratch) / "bare.git"
        _git(["clone", "--quiet", "--bare", "--shared", str(source.bundle), str(bare)], source.bundle, allow_paths=True)
        _git(["update-ref", "refs/heads/spotheal", source.commit], bare)
        _git(["symbolic-ref", "HEAD", "refs/heads/spotheal"], bare)
        _git(["bundle", "create", "--quiet", str(target.resolve()), "HEAD", "refs/heads/spotheal"], bare)
    return target


def check_address(repository: str) -> list[str]:
    """ConfigError for an address that no verb accepts; a note for a path, which only a rehearsal accepts."""
    if repository == HERE:
        return []
    _refuse_address(repository, allow_paths=True)
    try:
        _refuse_address(repository, allow_paths=False)
    except ConfigError as fault:
        return [f"{fault.message}: this is for `fleetctl rehearse` only"]
    return []


def _refuse_address(repository: str, allow_paths: bool) -> None:
    next_step = "correct [job] repository in job.toml"
    if re.match(r"https?://[^/]*@", repository):  # an access token may be in the place of a user name
        raise ConfigError(
            "[job] repository holds a user name, password or token, which user data would show to anyone on the"
            " instance",
            next_step="remove it from the address; `fleetctl secret put` and [job] repository_secret give it to the"
            ' instance alone, and `repository = "."` carries the commit without any',
        )
    if repository.startswith("-") or re.match(r"[\w+-]+::", repository):
        raise ConfigError(f"[job] repository {repository!r} is no address that git may clone here", next_step=next_step)
    if _URL.fullmatch(repository) or (_SCP.fullmatch(repository) and not Path(repository).exists()):
        return
    if not allow_paths:
        raise ConfigError(
            f'[job] repository {repository!r} is no https or ssh address, nor "."; instances cannot clone a path',
            next_step='write `repository = "."` to carry this checkout\'s commit, or push it and write its address',
        )


# --------------------------------------------------------------------------------------------------------------- script
def _clone_of(config: JobConfig, folder: Path) -> Path | None:
    """A clone of the job's repository on this machine, None if there is none."""
    repository = config.job.repository
    if repository != HERE and Path(repository).is_dir():
        return Path(repository)
    top = _top_of(folder)
    return top if top is not None and (repository == HERE or _remote_named(top, repository)) else None


def _script_notes(config: JobConfig, clone: Path, commit: str) -> list[str]:
    """ConfigError if the commit lacks the script that the command runs; a note if something else may bring it."""
    script = script_of(config.job.command)
    path = posixpath.normpath(posixpath.join(config.job.directory, script))
    if not script:
        return _bare_name_notes(config, clone, commit)
    if entry := _git(["ls-tree", "-z", commit, "--", path], clone):
        is_program = script == config.job.command[0]
        return _program_notes(config, script, commit) if is_program and entry.startswith("100644") else []
    message = f"[job] command runs {script}, which is not in commit {commit[:10]}"
    if config.job.setup or config.job.submodules:
        return [f"{message}; without a `setup` or a submodule that brings it, the trainer cannot start"]
    if (clone / path).is_file():
        raise ConfigError(message, next_step=f"`git add -f {path}` and `git commit`: it was never committed")
    names = [name for name in _git(["ls-tree", "-r", "--name-only", "-z", commit], clone).split("\0") if name]
    near = get_close_matches(path, names, n=3) or [name for name in names if Path(name).suffix == Path(path).suffix]
    cure = f"the commit has {_few(near)}" if near else "correct [job] command in job.toml"
    raise ConfigError(message, next_step=f"{cure}; paths are relative to [job] directory")


def _program_notes(config: JobConfig, script: str, commit: str) -> list[str]:
    """ConfigError for a script that is to run by itself and may not be executed; a note if a `setup` may permit it."""
    message = f"[job] command runs {script} itself, which is not executable in commit {commit[:10]}"
    if config.job.setup:
        return [f"{message}; without a `setup` that permits it, the trainer cannot start"]
    raise ConfigError(message, next_step=_with_interpreter(script))


def _bare_name_notes(config: JobConfig, clone: Path, commit: str) -> list[str]:
    """ConfigError for a script of the repository that is named without `./`; a note if a `setup` may put it on PATH."""
    name = config.job.command[0]
    if "/" in name or not name.endswith((".py", ".sh")):
        return []
    path = posixpath.normpath(posixpath.join(config.job.directory, name))
    if not (entry := _git(["ls-tree", "-z", commit, "--", path], clone)):
        return []
    message = f"[job] command runs {name}, but {name} is looked for on PATH, not in the repository"
    if config.job.setup:
        return [f"{message}; without a `setup` that installs it, the trainer cannot start"]
    is_program = entry.startswith("100755")
    raise ConfigError(message, next_step=f'write ["./{name}", …]' if is_program else _with_interpreter(name))


def _with_interpreter(script: str) -> str:
    interpreter = "python" if script.endswith(".py") else "sh"
    return f'begin the command with its interpreter: ["{interpreter}", "{script}", …]'


# --------------------------------------------------------------------------------------------------------------- remote
def _remote(repository: str, revision: str, allow_paths: bool) -> tuple[str, str]:
    """The commit and the full name of `revision`."""
    if _COMMIT.fullmatch(revision):
        _list_remote(repository, ["HEAD"], allow_paths)  # checks the address; the clone shows if the commit is there
        return revision, revision
    patterns = (
        ["HEAD"]
        if not revision
        else [f"refs/heads/{revision}", f"refs/tags/{revision}", f"refs/tags/{revision}^{{}}", revision]
    )
    refs = _list_remote(repository, patterns, allow_paths)
    if not revision:
        if "HEAD" not in refs:
            raise NotFound(
                f"{repository} has no default branch (is it empty?)",
                next_step="push a commit, or name a branch in [job] revision",
            )
        return refs["HEAD"], "HEAD"
    tag = refs.get(f"refs/tags/{revision}^{{}}") or refs.get(f"refs/tags/{revision}")
    branch = refs.get(f"refs/heads/{revision}")
    if tag and branch and tag != branch:
        raise ConfigError(
            f"{repository} has a branch and a tag {revision!r}, at different commits",
            next_step=f"write refs/heads/{revision} or refs/tags/{revision} in [job] revision",
        )
    for name, commit in (
        (f"refs/heads/{revision}", branch),
        (f"refs/tags/{revision}", tag),
        (revision, refs.get(revision)),
    ):
        if commit:
            return commit, name
    short = re.fullmatch(r"[0-9a-f]{4,39}", revision)
    raise NotFound(
        f"{repository} has no branch or tag {revision!r}",
        next_step="write the commit's full 40 digits (`git rev-parse " + revision + "`)"
        if short
        else f"`git ls-remote {repository}` lists them; is it pushed?",
    )


def _list_remote(repository: str, patterns: list[str], allow_paths: bool) -> dict[str, str]:
    output = _git(["ls-remote", "--", repository, *patterns], None, allow_paths=allow_paths, remote=repository)
    return {name: commit for commit, name in (line.split("\t", 1) for line in output.splitlines() if "\t" in line)}


# ------------------------------------------------------------------------------------------------------------- checkout
def _checkout(folder: Path, revision: str, ours: tuple[Path, ...]) -> Source:
    top = _top_of(folder)
    if top is None:
        raise ConfigError(
            f'[job] repository is ".", and {folder.resolve()} is in no git checkout',
            next_step="`git init`, commit, and try again; or write the repository's address",
        )
    if _git(["rev-parse", "--is-shallow-repository"], top).strip() == "true":
        raise ConfigError(
            "this checkout is shallow: a bundle of it could not be cloned", next_step="git fetch --unshallow"
        )
    commit = _commit(top, revision or "HEAD")
    head = _commit(top, "HEAD")
    if commit is None:
        raise NotFound(
            f"this checkout has no revision {revision or 'HEAD'!r}",
            next_step="commit first" if head is None else "`git log --oneline` lists commits",
        )
    notes: tuple[str, ...] = ()
    if commit == head:
        notes = _refuse_uncommitted(
            top, ours, "commit it (`git add` and `git commit`); instances get the commit, not the folder"
        )
    return Source(HERE, commit, revision or "HEAD", top, notes)


def _compare_with_checkout(
    repository: str, revision: str, commit: str, ref: str, folder: Path, ours: tuple[Path, ...]
) -> tuple[str, ...]:
    """Refuse work in this checkout that the address does not have; any other difference is a warning."""
    top = _top_of(folder)
    remote = _remote_named(top, repository) if top else None
    if top is None or remote is None:
        return ()
    branch = _git(["branch", "--show-current"], top).strip()
    if revision and revision not in (branch, f"refs/heads/{branch}"):
        return ()  # the revision is pinned on purpose
    notes = _refuse_uncommitted(top, ours, 'commit and push it, or write `repository = "."` and commit')
    head = _commit(top, "HEAD")
    if head is None or head == commit:
        return notes
    fetched = [commit] if _commit(top, commit) else []
    unpushed = _git(["rev-list", "--count", "HEAD", "--not", f"--remotes={remote}", *fetched], top)
    if int(unpushed.strip() or 0):
        raise Conflict(
            f"this checkout has {unpushed.strip()} commit(s) that {repository} does not have",
            next_step=f'`git push {remote} {branch or "HEAD"}`, or write `repository = "."` to carry them, '
            "or pin a commit in [job] revision",
        )
    return (
        *notes,
        f"the run trains {commit[:10]} ({ref}); this checkout is at {head[:10]}" + (f" ({branch})" if branch else ""),
    )


def _refuse_uncommitted(top: Path, ours: tuple[Path, ...], cure: str) -> tuple[str, ...]:
    """Refuse changed files, and new files that look like code (a forgotten `git add`); other new files are a note."""
    request_files = {path.resolve() for path in ours}
    output = _git(["status", "--porcelain=v1", "-z", "--no-renames", "--untracked-files=all"], top)
    entries = [(entry[:2], entry[3:]) for entry in output.split("\0") if entry]
    entries = [
        (state, name)
        for state, name in entries
        if (top / name).resolve() not in request_files and not is_job_file(top / name)
    ]
    changed = [name for state, name in entries if state != "??"]
    new = [name for state, name in entries if state == "??" and Path(name).suffix in _CODE]
    if changed or new:
        named = [f"changed: {_few(changed)}"] if changed else []
        named += [f"not added to git: {_few(new)}"] if new else []
        add = f"`git add {new[0]}` adds a new file; a file that the job does not need goes to .gitignore" if new else ""
        raise Conflict(
            f"this checkout has uncommitted work: {'; '.join(named)}", next_step="; ".join(filter(None, [cure, add]))
        )
    untracked = [name for _, name in entries]
    return (f"not part of the commit, so not there on the instances: {_few(untracked)}",) if untracked else ()


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _top_of(folder: Path) -> Path | None:
    try:
        return Path(_git(["rev-parse", "--show-toplevel"], folder.resolve()).rstrip("\n"))
    except ConfigError:
        return None


def _commit(top: Path, revision: str) -> str | None:
    try:
        return (
            _git(["rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"], top).strip()
            or None
        )
    except ConfigError:
        return None


def _remote_named(top: Path, repository: str) -> str | None:
    """The remote of the checkout that has this address, written either way."""
    for name in _git(["remote"], top).split():
        if same_repository(_git(["remote", "get-url", name], top).strip(), repository):
            return name
    return None


def same_repository(address: str, other_address: str) -> bool:
    """`git@host:a/b.git`, `ssh://git@host/a/b` and `https://host/a/b` are the same repository."""
    return _plain_address(address) == _plain_address(other_address)


def _plain_address(address: str) -> str:
    text = address.strip().rstrip("/")
    text = text[:-4] if text.endswith(".git") else text
    if match := re.fullmatch(r"(?:https?|ssh|git)://(?:[^@/]*@)?([^/:]+)(?::\d+)?/(.+)", text):
        return f"{match.group(1).lower()}/{match.group(2)}"
    if (match := re.fullmatch(r"(?:[\w.-]+@)?([\w.-]+):(.+)", text)) and not Path(text).exists():
        return f"{match.group(1).lower()}/{match.group(2).lstrip('/')}"
    return str(Path(text).resolve())


# ------------------------------------------------------------------------------------------------------------------ git
def _git(arguments: list[str], folder: Path | None, *, allow_paths: bool = False, remote: str = "") -> str:
    """Run git; ConfigError with its message if it fails, a more exact error if the remote's answer is known."""
    argv = [
        "git",
        "-c",
        "protocol.ext.allow=never",
        "-c",
        f"protocol.file.allow={'always' if allow_paths else 'never'}",
        "-c",
        "core.quotePath=false",
        *arguments,
    ]
    environment = {
        **os.environ,
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "true",
        "LC_ALL": "C",
        "GIT_OPTIONAL_LOCKS": "0",
    }
    environment.setdefault("GIT_SSH_COMMAND", "ssh -o BatchMode=yes -o ConnectTimeout=15")
    try:
        process = subprocess.run(
            argv,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_SECONDS_MAX,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except FileNotFoundError:
        raise ConfigError("git is not installed here", next_step="install git") from None
    except subprocess.TimeoutExpired:
        raise Retryable(
            f"git {arguments[0]} {remote} gave no answer for {GIT_SECONDS_MAX:.0f} s",
            next_step="check the network and the address, then try again",
        ) from None
    if process.returncode == 0:
        return process.stdout
    message = " ".join(process.stderr.split()) or f"exit {process.returncode}"
    if not remote:
        raise ConfigError(f"git {arguments[0]} failed: {message}")
    if any(sign in message for sign in _PERMISSION):
        raise PermissionDenied(
            f"{remote} cannot be read: {message}",
            next_step="try `git ls-remote` with it here, where it is pinned; the instance clones with [job]"
            ' repository_secret; `repository = "."` carries the commit of a private repository',
        )
    if any(sign in message for sign in _MISSING):
        raise NotFound(f"{remote} cannot be read: {message}", next_step="correct [job] repository in job.toml")
    next_step = "check the network and the address, then try again"
    raise Retryable(f"{remote} cannot be read: {message}", next_step=next_step)
