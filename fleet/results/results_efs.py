"""Results on EFS, which no AWS call can read: listed from the run's store, fetched from a folder where the file system
is mounted, or over ssh through an instance that has it mounted."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.errors import NotFound, PermissionDenied, Retryable, SpothealError
from spotheal.agent.protocol.names import LAYOUT, TAG_RUN, EfsUrl, StoreUrl, parse_results
from spotheal.fleet.results.results import Fetched, Objects, Result, Source, damaged, objects, partial_of
from spotheal.fleet.run import ssh
from spotheal.fleet.run.runs import Run
from spotheal.fleet.run.store_documents import sensible

if TYPE_CHECKING:
    from spotheal.fleet.run.session import Session

MOUNT_POINT = "/var/lib/spotheal/shared/efs"  # agent.efs mounts it there
_CHUNK = 1 << 20
_INSTANCES_TRIED = 3
_ASK_SECONDS = 60.0
_CHANGING_TRIES = 3
_WORK_BATCH = frozenset({"state"})
_WORK_NODES = frozenset({"checkpoints", "working", "keep", "logs", "progress", ".spotheal"})
# Only a rehearsal's machines set SPOTHEAL_ROOT. The run's folder belongs to the trainer, so it may need root to read.
_READ = (
    'f="${SPOTHEAL_ROOT:-}"PATH; if [ -r "$f" ]; then exec PROGRAM; fi; '
    "if sudo -n true 2>/dev/null; then exec sudo -n PROGRAM; fi; exec PROGRAM"
)
Say = Callable[[str], None]


def remote(path: str, program: str) -> str:
    """The shell command for an instance that runs `program`, in which `"$f"` is the path."""
    return _READ.replace("PROGRAM", program).replace("PATH", shlex.quote(path))


# ------------------------------------------------------------------------------------------------------ their location
@sensible
def place_of(run: Run) -> StoreUrl | EfsUrl | None:
    """The value of `store.results` when the run was requested; None: the run's own store."""
    document = run.store.get_json(LAYOUT.job_document) or {}
    url = str((document.get("store") or {}).get("results") or "")
    return parse_results(url) if url else None


@sensible
def listed(run: Run) -> tuple[Result, ...]:
    """The agents' lists of results outside the run's store; those of a sweep's runs below their numbers."""
    count = int(((run.store.get_json(LAYOUT.job_document) or {}).get("run") or {}).get("entries") or 0)
    keys = {f"{index}/": f"{LAYOUT.entry(index)}/{LAYOUT.results_listing}" for index in range(count)}
    keys = keys or {"": LAYOUT.results_listing}
    with ThreadPoolExecutor(8) as pool:
        documents = zip(keys, pool.map(run.store.get_json, keys.values()), strict=True)
        return tuple(_result(top, item) for top, document in documents for item in (document or {}).get("files", []))


def _result(top: str, item: Mapping[str, Any]) -> Result:
    return Result(f"{top}{item['name']}", int(item["size"]), None, str(item.get("sha256") or ""))


@contextmanager
def opened(
    session: Session, run: Run, folder: Path | None, say: Say, *, user: str = "", identity: Path | None = None,
    reading: bool = True,
) -> Iterator[Source]:
    """The source of the run's results. `folder`: where EFS is mounted here. `reading` False: they are only listed."""
    place = place_of(run)
    if folder is not None and not isinstance(place, EfsUrl):
        say("note: --from is not used: the results of this run are in S3")
    with ExitStack() as stack:
        match place:
            case None:
                yield objects(run)
            case StoreUrl():
                yield Objects(run.store.client, place.below(run.job, run.id))
            case EfsUrl() if folder is not None:
                yield Mounted(_below(folder, place, run), listed(run), _work_of(run))
            case EfsUrl() if not reading:
                yield Listed(f"{place}/{run.job}/{run.id}/", listed(run))
            case EfsUrl():
                path = "/".join(part for part in (MOUNT_POINT, place.folder, run.job, run.id) if part)
                connection = _connection(stack, session, run, path, say, place, user, identity)
                yield OverSsh(connection, path, listed(run), _work_of(run))


@sensible
def _work_of(run: Run) -> frozenset[str]:
    """Folders in the run's folder in which agents work: of containers at Batch, or of several machines."""
    if run.fleet_document().get("engine") == "batch":
        return _WORK_BATCH
    nodes = ((run.store.get_json(LAYOUT.job_document) or {}).get("job") or {}).get("nodes") or "1"
    return _WORK_NODES if nodes != "1" else frozenset()


class Listed:
    """Results on EFS as the run's store lists them; they cannot be read from here."""

    def __init__(self, place: str, results: tuple[Result, ...]) -> None:
        self._place, self._results = place, results

    def __str__(self) -> str:
        return self._place

    def list(self) -> tuple[Result, ...]:
        return self._results

    def fetch(self, result: Result, target: Path, progress: Callable[[int], None]) -> Fetched:
        raise NotFound(f"{result.name} lies on {self._place}")


# ------------------------------------------------------------------------------------------------------- mounted here
def _below(folder: Path, place: EfsUrl, run: Run) -> Path:
    """The run's own folder, if `folder` is the top of the file system or any folder on the way to it."""
    for parts in ((place.folder, run.job, run.id), (run.job, run.id), (run.id,)):
        if (path := folder.joinpath(*parts)).is_dir():
            return path
    if folder.name == run.id and folder.is_dir():
        return folder
    raise NotFound(
        f"no folder of run {run.id} is below {folder}",
        next_step=f"--from where {place.file_system} is mounted; or the folder is another user's: sudo",
    )


class Mounted:
    """A folder: the file system is mounted on this machine."""

    def __init__(self, folder: Path, results: tuple[Result, ...], work: Collection[str] = ()) -> None:
        """`work`: folders with checkpoints and the like, which are no results, except files that an agent listed."""
        self._folder, self._known, self._work = folder, {result.name: result for result in results}, work

    def __str__(self) -> str:
        return f"{self._folder}/"

    def list(self) -> tuple[Result, ...]:
        """The files in the folder, also of a live run; half-written files are hidden files and left out."""
        results = []
        for top, _, names in os.walk(self._folder):
            for name in names:
                path = Path(top, name)
                with suppress(FileNotFoundError):  # deleted since os.walk listed it
                    if not path.is_symlink() and path.is_file():
                        facts, relative = path.stat(), path.relative_to(self._folder).as_posix()
                        modified = _moment(facts.st_mtime)
                        results.append(Result(relative, facts.st_size, modified))
        return _results(results, self._known, self._work)

    def fetch(self, result: Result, target: Path, progress: Callable[[int], None]) -> Fetched:
        with (self._folder / result.name).open("rb") as original:
            if not result.sha256:  # a live run's: it may have been replaced since it was listed
                result = replace(result, size=os.fstat(original.fileno()).st_size)
            return _copy(result, target, lambda: original.read(_CHUNK), original.seek, progress)


def _results(files: Iterable[Result], listing: Mapping[str, Result], work: Collection[str]) -> tuple[Result, ...]:
    """`files` with the checksums from the agents' list; half-written files and files in `work` are left out."""
    results = []
    for file in files:
        name, note = file.name.rpartition("/")[2], listing.get(file.name)
        if (name.startswith(".") and name.endswith(".partial")) or (not note and file.name.partition("/")[0] in work):
            continue
        results.append(replace(file, sha256=note.sha256) if note is not None and note.size == file.size else file)
    return tuple(sorted(results, key=lambda result: result.name))


def _copy(
    result: Result, target: Path, read: Callable[[], bytes], skip: Callable[[int], object],
    progress: Callable[[int], None],
) -> Fetched:
    """Write `target`. `skip(n)` goes to byte n of the original; `read` gives the next bytes, b"" at its end."""
    if target.is_file() and target.stat().st_size == result.size and result.sha256 and _sha256(target) == result.sha256:
        progress(result.size)
        return Fetched(result.name, target, result.size, "sha256", was_there=True)
    partial = partial_of(target, result.sha256 or f"{result.size} {result.modified}")
    with partial.open("ab") as file:
        if not result.sha256 or file.tell() > result.size:  # the rest may be of another version
            file.truncate(0)
        offset = file.tell()
        progress(offset)
        if offset < result.size or not result.size:
            skip(offset)
            while chunk := read():
                file.write(chunk)
                progress(len(chunk))
                if file.tell() > result.size:  # it grows, or is none of the sizes that were told
                    break
        file.flush()
        os.fsync(file.fileno())
    size = partial.stat().st_size
    if size < result.size:
        raise Retryable(f"{result.name} was cut off", next_step="the same command continues where it stopped")
    if size != result.size or (result.sha256 and _sha256(partial) != result.sha256):
        raise damaged(partial, result.name)
    os.replace(partial, target)
    return Fetched(result.name, target, result.size, "sha256" if result.sha256 else "size", was_there=False)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------------------ over ssh
def _connection(
    stack: ExitStack, session: Session, run: Run, path: str, say: Say, place: EfsUrl, user: str, identity: Path | None
) -> ssh.Connection:
    """A connection to an instance that has the run's folder mounted: the run's own, else one of any job."""
    last: SpothealError | None = None
    for host in _hosts(session, run)[:_INSTANCES_TRIED]:
        try:
            connection = stack.enter_context(ssh.Connection(session, host, say, user=user, identity=identity))
            answer = _ask(connection, remote(path, 'test -d "$f"'))
            if answer.returncode == 0:
                connection.remember()
                say(f"through {host.instance}, which has {place.file_system} mounted")
                return connection
            if answer.returncode == 255:
                last = connection.refusal(answer.stderr.decode(errors="replace").strip())
        except SpothealError as error:
            last = error
    command = f"`fleetctl results get {run.job} --from DIR`"
    mount = f"mount {place.file_system} on a machine in its VPC and type {command} on it"
    if last is not None:
        raise PermissionDenied(f"the results on {place} cannot be fetched: {last.message}", next_step=mount)
    raise NotFound(
        f"the results of run {run.id} lie on {place}, and no instance of fleetctl's that has it mounted is up",
        next_step=f"{mount}; docs/results.md shows the mount",
    )


def _hosts(session: Session, run: Run) -> list[ssh.Host]:
    run_hosts = [host for host in ssh.hosts(session, run) if host.state == "running" and host.address]
    filters = [{"Name": "tag-key", "Values": [TAG_RUN]}, {"Name": "instance-state-name", "Values": ["running"]}]
    with translated("list the instances of all jobs"):
        pages = session.client("ec2").get_paginator("describe_instances").paginate(Filters=filters)
        items = [item for page in pages for reservation in page["Reservations"] for item in reservation["Instances"]]
    other_hosts = [ssh.host_of(item) for item in items]
    instances = {host.instance for host in run_hosts}
    return run_hosts + [host for host in other_hosts if host.instance not in instances and host.address]


def _ask(connection: ssh.Connection, command: str) -> subprocess.CompletedProcess[bytes]:
    argv = connection.argv([command], ["-T", "-o", "BatchMode=yes"])
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASK_SECONDS)
    except subprocess.TimeoutExpired:
        raise Retryable(f"{connection.host.instance} does not answer", next_step="the same command again") from None


class OverSsh:
    """Files on an instance, read by `tail -c`, one after the other."""

    def __init__(
        self, connection: ssh.Connection, path: str, results: tuple[Result, ...], work: Collection[str] = ()
    ) -> None:
        """`work`: as in `Mounted`."""
        self._connection, self._path, self._work = connection, path, work
        self._known = {result.name: result for result in results}

    def __str__(self) -> str:
        return f"{self._connection.host.instance}:{self._path}/"

    def list(self) -> tuple[Result, ...]:
        """The results in the store's list, and for a live run also the other files that the instance has."""
        answer = _ask(self._connection, remote(self._path, "find -P \"$f\" -type f -printf '%s %T@ %P\\0'"))
        results = _results(_found(answer.stdout), self._known, self._work)
        missing = self._known.keys() - {result.name for result in results}
        return tuple(sorted([*results, *(self._known[name] for name in missing)], key=lambda result: result.name))

    def fetch(self, result: Result, target: Path, progress: Callable[[int], None]) -> Fetched:
        """A file without a checksum belongs to a live run, which may replace it at any moment."""
        for _ in range(0 if result.sha256 else _CHANGING_TRIES - 1):
            with suppress(Retryable):
                return self._fetch(self._now(result), target, progress)
        return self._fetch(result if result.sha256 else self._now(result), target, progress)

    def _now(self, result: Result) -> Result:
        answer = _ask(self._connection, remote(f"{self._path}/{result.name}", "stat -c %s \"$f\""))
        size = answer.stdout.decode(errors="replace").strip()
        return replace(result, size=int(size)) if size.isdigit() else result

    def _fetch(self, result: Result, target: Path, progress: Callable[[int], None]) -> Fetched:
        programs: list[subprocess.Popen[bytes]] = []

        def begin(offset: int) -> None:
            command = remote(f"{self._path}/{result.name}", f'tail -c +{offset + 1} "$f"')
            argv = self._connection.argv([command], ["-T", "-o", "BatchMode=yes"])
            programs.append(subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            ))  # fmt: skip

        def read() -> bytes:
            assert programs[0].stdout is not None
            return programs[0].stdout.read1(_CHUNK)  # type: ignore[attr-defined, no-any-return]

        try:
            return _copy(result, target, read, begin, progress)
        finally:
            for program in programs:
                program.kill()
                program.wait()
                if program.stdout is not None:
                    program.stdout.close()


def _found(printed: bytes) -> Iterable[Result]:
    for line in printed.split(b"\0"):
        size, _, rest = line.partition(b" ")
        time, _, name = rest.partition(b" ")
        text = name.decode(sys.getfilesystemencoding(), "replace")
        if size.isdigit():
            yield Result(text, int(size), _moment(time.decode("ascii", "replace")))


def _moment(seconds: float | str) -> datetime:
    """The time of a file's last write; 1970 if its owner gave it a time outside the calendar."""
    try:
        return datetime.fromtimestamp(float(seconds), timezone.utc)
    except (ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(0, timezone.utc)
