"""The working copy: the code at its commit, on the volume, with all that the trainer wrote next to it.

    <volume>/working-copy/                the folder the trainer runs in; all of it is the trainer's user's
    <volume>/.spotheal/working-copy.json  whose copy this is, of which commit, and the content of the commit's files
    <volume>/.spotheal/incoming/          the copy of another commit, until it takes the place of the one before
    <volume>/.spotheal/incoming.json      its record; it is there once `incoming` holds the whole commit, on disk
    <volume>/.spotheal/outgoing/          the copy before, while the new one takes its place

`.spotheal` is root's. A machine may be lost between any two steps: `incoming` without its record is dropped; with it,
what the trainer wrote is moved over (again), the two change places and the record is written, last. Root makes and
renames whole folders and opens nothing inside that a trainer could have made: that is `carry_over`'s, which runs as the
trainer's user.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from spotheal.agent.files import untrusted_folders
from spotheal.agent.files.folders import Folders, give, publish
from spotheal.agent.processes import programs
from spotheal.agent.processes.environment import base_environment
from spotheal.agent.processes.foreign_command import Surroundings, run_command
from spotheal.agent.protocol import bounded_json
from spotheal.agent.protocol.errors import Retryable, SetupFailed
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.repository import carry_over
from spotheal.agent.repository.checkout import commit_record, source_of

COPY_SECONDS_MAX = 1800.0
SYNC_SECONDS_MAX = 300.0
_RECORD_BYTES_MAX = 1 << 30  # a line for each file of a repository
_SHOWN = 20  # paths that one line of the log names


@dataclass(frozen=True)
class Record:
    """`made`: of the first copy of this run on the volume; another one lacks what `setup` wrote into this. `files`:
    what `carry_over.content_of` said of each file of the commit. `setup`: the same of those that `setup` has changed.
    """

    run: str
    made: str
    source: Mapping[str, Any]
    files: Mapping[str, str]
    setup: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """None if there is none; the folder is ours, so one that is there is whole. Retryable if it cannot be read:
        the copy of a record that only seems to be missing would be set aside, with every checkpoint in it."""
        try:
            return cls(**bounded_json.parse_object(path.read_text(encoding="utf-8"), bytes_max=_RECORD_BYTES_MAX))
        except (FileNotFoundError, ValueError, TypeError):
            return None
        except OSError as error:
            raise Retryable(f"the record of the working copy {path} cannot be read: {error.strerror}") from error

    def write(self, path: Path) -> None:
        publish(path, json.dumps(asdict(self)), durable=True)


def files_of(code: Path) -> dict[str, str]:
    """The content of each file of a clone, by its path; git's own files are left out."""
    files = {}
    for below, folders, names, folder in untrusted_folders.walk(code):
        if not below:
            folders[:] = [name for name in folders if name != ".git"]
        for name in names:
            if content := carry_over.content_of(name, dir_fd=folder):
                files[os.path.join(below, name)] = content
    return files


@dataclass(frozen=True)
class Fetched:
    """A clone on the machine's own disk, and `files_of` it."""

    code: Path
    files: Mapping[str, str]


def is_on_volume(config: InstanceConfig, folders: Folders) -> bool:
    """Whether the volume has this run's working copy at its revision: then neither network nor repository is needed."""
    record = Record.read(folders.private / "incoming.json") or _record_of_copy(folders)
    return record is not None and record.run == config.run and record.source == source_of(config)


def files_of_commit(folders: Folders) -> frozenset[str]:
    """Paths below the working copy that its commit has."""
    return frozenset(commit_contents(folders))


def commit_contents(folders: Folders) -> Mapping[str, str]:
    """The same, with what `carry_over.content_of` said of each before the script ran; nothing if that cannot be read.
    """
    try:
        record = _record_of_copy(folders) if folders.has_working_copy else None
    except Retryable:
        record = None
    return {} if record is None else {**record.files, **record.setup}


def make_working_copy(
    config: InstanceConfig,
    folders: Folders,
    surroundings: Surroundings,
    python: Path,
    log: Any,
    *,
    fetched: Fetched | None,
    began_earlier: bool = False,
) -> str:
    """The folder `folders.clone` at the run's revision, with what the trainer wrote into it before; returns its `made`.

    `fetched` None: `is_on_volume` has said that it is there. `began_earlier`: an agent that knew no working copy has
    trained this run. `python` runs `carry_over`. SetupFailed where the volume is full, Retryable, Interrupted.
    """
    making = _Making(config, folders, surroundings, python, log)
    making.finish()
    if fetched is None:
        log.info("the working copy is there already", path=str(folders.clone), revision=config.revision)
    else:
        making.put(fetched, began_earlier)
    if replaced := link_kept(config.job.job.keep, folders, surroundings, python):
        log.warning(
            "the script wrote files in place of the link of a kept path; its newest are used",
            files=replaced[:_SHOWN], more=len(replaced[_SHOWN:]) or None,
        )  # fmt: skip
    record = _record_of_copy(folders)
    return "" if record is None else record.made


def _record_of_copy(folders: Folders) -> Record | None:
    return Record.read(folders.private / "working-copy.json") if os.path.lexists(folders.clone) else None


def _beside(clone: Path, suffix: str) -> Path:
    target = clone.with_name(f"{clone.name}-{suffix}")
    while os.path.lexists(target):
        target = target.with_name(target.name + "-")
    return target


class _Making:
    def __init__(
        self, config: InstanceConfig, folders: Folders, surroundings: Surroundings, python: Path, log: Any
    ) -> None:
        self._config, self._folders, self._where, self._python, self._log = config, folders, surroundings, python, log
        self._incoming, self._outgoing = folders.private / "incoming", folders.private / "outgoing"
        self._record, self._incoming_record = folders.private / "working-copy.json", folders.private / "incoming.json"

    def put(self, fetched: Fetched, began_earlier: bool) -> None:
        record = _record_of_copy(self._folders)
        if record is None or record.run != self._config.run:
            self._set_aside("" if record is None else record.run)
            record = None
        token = secrets.token_hex(8) if record is None else record.made
        self._fill(fetched.code)
        Record(self._config.run, token, source_of(self._config), fetched.files).write(self._incoming_record)
        self.finish()
        if began_earlier and record is None:
            order = {"copy": str(self._folders.clone), "keep": str(self._folders.keep)}
            _run_program("link-kept", order, self._folders, self._where, self._python)
        self._log.info("the working copy is made", path=str(self._folders.clone), files=len(fetched.files))

    # ------------------------------------------------------------------------------------------------------------ steps
    def finish(self) -> None:
        """What a copy that is complete lacks to be the working copy, also where a machine that was lost began it."""
        coming = Record.read(self._incoming_record)
        clone = self._folders.clone
        if coming is not None:
            if os.path.lexists(self._incoming):
                if os.path.lexists(clone):
                    rest = self._carry(clone)
                    os.rename(clone, rest)
                os.rename(self._incoming, clone)
            coming.write(self._record)
            self._incoming_record.unlink()
        for rest in (self._incoming, self._outgoing):
            if os.path.lexists(rest):
                untrusted_folders.remove(rest)
        if _record_of_copy(self._folders) is not None:
            self._give(clone)

    def _carry(self, old: Path) -> Path:
        """Returns where `old` goes then: what could not be moved is never deleted."""
        self._give(old)
        folders = {"old": old, "new": self._incoming, "record": self._record, "keep": self._folders.keep}
        order = {name: str(path) for name, path in folders.items()}
        entries = _run_in_copy("carry", order, [old], self._folders, self._where, self._python)
        changed = [f"{entry['path']} ({entry['what']})" for entry in entries if entry["what"] != carry_over.LEFT]
        if changed:
            self._log.warning(
                "the script changed files that the repository has too; its own stay in place of the commit's",
                files=changed[:_SHOWN], more=len(changed[_SHOWN:]) or None,
            )  # fmt: skip
        unmoved = [entry["path"] for entry in entries if entry["what"] == carry_over.LEFT]
        if not unmoved:
            return self._outgoing
        record = Record.read(self._record)
        aside = _beside(old, str(record.source["revision"])[:12] if record else "unknown")
        self._log.warning(
            "files of the script could not be moved into the copy of another commit; they stay in the copy before",
            path=str(aside), files=unmoved[:_SHOWN], more=len(unmoved[_SHOWN:]) or None,
        )  # fmt: skip
        return aside

    def _fill(self, code: Path) -> None:
        self._incoming.mkdir()
        copied = programs.run(["cp", "-a", f"{code}/.", str(self._incoming)], seconds_max=COPY_SECONDS_MAX)
        if "No space left" in copied.err:
            raise SetupFailed(
                f"the volume has no room for the working copy of the repository: {copied.said}",
                next_step="a larger [volume] size_gib, or fewer data sets in the repository",
            )
        if copied.code == 0:
            self._give(self._incoming)
            copied = programs.run(["sync", "-f", str(self._incoming)], seconds_max=SYNC_SECONDS_MAX)
        if copied.code != 0:
            raise Retryable(f"the working copy cannot be put onto the volume: {copied.said}")

    def _set_aside(self, run: str) -> None:
        """A new run begins with a clean copy. Nothing is deleted: the earlier run may have no other checkpoint."""
        clone = self._folders.clone
        if os.path.lexists(clone):
            target = _beside(clone, run or "unknown")
            os.rename(clone, target)
            self._log.info("the working copy of another run is set aside", path=str(target))
        self._record.unlink(missing_ok=True)

    def _give(self, folder: Path) -> None:
        """To a trainer's user that has another number on this machine image."""
        account, status = self._where.account, os.lstat(folder)
        if not stat.S_ISDIR(status.st_mode):
            raise SetupFailed(f"{folder} is no folder", next_step="move it away: the working copy goes there")
        if account is not None and status.st_uid != account.uid:
            give(folder, account)


@contextlib.contextmanager
def changed_by_setup(folders: Folders, surroundings: Surroundings, python: Path) -> Iterator[None]:
    """Record which of the commit's files `setup`, which runs meanwhile, changes: it runs again at another commit, so
    there they are not the script's. If a machine is lost meanwhile, or the script has changed a file before, it counts
    as the script's: nothing of a script may be taken for ours."""
    record = _record_of_copy(folders) if folders.has_working_copy else None
    if record is None:
        yield
        return
    place = folders.private / "working-copy.json"
    order = {"copy": str(folders.clone), "record": str(place)}

    def changed() -> dict[str, str]:
        entries = _run_program("changed", order, folders, surroundings, python)
        return {entry["path"]: entry["what"] for entry in entries}

    before = changed()
    yield
    after = {path: content for path, content in changed().items() if path not in before}
    if after:
        replace(record, setup={**record.setup, **after}).write(place)


def link_kept(paths: Sequence[str], folders: Folders, surroundings: Surroundings, python: Path) -> list[str]:
    """Make `paths` of the working copy links into the folder `keep`; SetupFailed where one would lead out of it.

    Returns what was not as the commit has it and replaced a file in `keep`, as text for a person."""
    if not paths:
        return []
    record = str(_commit_record(folders))
    order = {"copy": str(folders.clone), "keep": str(folders.keep), "paths": list(paths), "record": record}
    entries = _run_in_copy("link", order, [folders.clone, folders.keep], folders, surroundings, python)
    return [f"{entry['path']} ({entry['what']})" for entry in entries]


def _commit_record(folders: Folders) -> Path:
    """A clone that is no working copy is recorded before its first trainer: at a restart of the agent on the same boot
    it is not cloned again, and only the record tells a save that replaced a link from the commit's file."""
    if folders.has_working_copy:
        return folders.private / "working-copy.json"
    record = commit_record(folders.fetched)
    if not record.exists():
        publish(record, json.dumps({"files": files_of(folders.clone)}))
    return record


def _run_in_copy(
    order: str,
    details: Mapping[str, Any],
    trainers: Sequence[Path],
    folders: Folders,
    surroundings: Surroundings,
    python: Path,
) -> list[dict[str, str]]:
    """`_run_program`; if some files are of another owner (root's, over ssh or from a container), `trainers` are given
    to the trainer's user and it runs again."""
    entries = _run_program(order, details, folders, surroundings, python)
    if surroundings.account is None or not any(entry.get("what") == carry_over.LEFT for entry in entries):
        return entries
    for folder in trainers:
        give(folder, surroundings.account)
    moved = [entry for entry in entries if entry.get("what") != carry_over.LEFT]
    return moved + _run_program(order, details, folders, surroundings, python)


def _run_program(
    order: str, details: Mapping[str, Any], folders: Folders, surroundings: Surroundings, python: Path
) -> list[dict[str, str]]:
    """What `carry_over` prints: all of it, for a line that is missed may be the file that must not be deleted."""
    lines: list[str] = []
    text = Path(carry_over.__file__).read_text(encoding="utf-8")
    ended = run_command(
        [str(python), "-I", "-S", "-c", text, order, json.dumps(details)],
        surroundings,
        directory=Path("/"),
        environment=base_environment(os.environ, surroundings.account, folders.home),
        seconds_max=COPY_SECONDS_MAX,
        on_line=lines.append,
    )
    entries = _lines(lines)
    if ended.exit_code == carry_over.EXIT_REFUSED and entries:
        raise SetupFailed(entries[-1].get("refused", ""), next_step="correct `keep` in job.toml, or what it names")
    if not ended.ok:
        raise Retryable(f"`{order}` in the working copy failed: {ended.tail(5)}")
    return entries


def _lines(lines: Sequence[str]) -> list[dict[str, str]]:
    entries = []
    for line in lines:
        try:
            entries.append({name: str(value) for name, value in bounded_json.parse_object(line).items()})
        except ValueError:
            continue
    return entries
