"""Where things lie on an instance: what a trainer is given, and what the agent keeps for itself."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from spotheal.agent.files import untrusted_folders
from spotheal.agent.processes.account import Account
from spotheal.agent.protocol.errors import SetupFailed

PRIVATE = ".spotheal"  # the agent's own folder on the volume


@dataclass(frozen=True)
class Folders:
    """`datasets` … `keep`, `environments` and `clone` lie on the volume, the others on the machine.

    `fetched` is where git clones to, `clone` the folder the trainer runs in: on a volume the working copy, which
    outlives the machine; where there is none they are the same.
    `run_dir` belongs to the agent and only its subfolder `trainer` to the trainer: an agent that runs as root must
    never write by name in a folder in which the trainer could have put a link.
    """

    datasets: Path
    checkpoints: Path
    results: Path
    logs: Path
    clone: Path
    fetched: Path
    run_dir: Path
    trainer_lib: Path
    keep: Path
    environments: Path
    home: Path  # HOME of a trainer whose user has none
    # Of a run on several machines this lies where all see it, and the ranks' logs apart for each:
    progress: Path | None = None
    ranks: Path | None = None

    @classmethod
    def at(cls, root: Path, mount: str) -> Folders:
        """The layout below `root` (SPOTHEAL_ROOT, "/" on a real instance) with the volume at `mount`."""
        volume = root / mount.lstrip("/")
        return cls(
            datasets=volume / "datasets",
            checkpoints=volume / "checkpoints",
            results=volume / "results",
            logs=volume / "logs",
            clone=volume / "working-copy",
            fetched=root / "var/lib/spotheal/src",
            run_dir=root / "run/spotheal",
            trainer_lib=root / "opt/spotheal/trainer",
            keep=volume / "keep",
            environments=volume / PRIVATE,
            home=root / "var/lib/spotheal/home",
        )

    @property
    def has_working_copy(self) -> bool:
        """Whether what the trainer writes next to its code outlives the machine."""
        return self.clone != self.fetched

    @property
    def private(self) -> Path:
        """What the agent keeps of the run between its machines, next to the environments of `setup`."""
        return self.environments

    @property
    def notice_file(self) -> Path:
        return self.run_dir / "notice.json"

    @property
    def rebalance_file(self) -> Path:
        return self.run_dir / "rebalance"

    @property
    def progress_file(self) -> Path:
        return self.progress or self.run_dir / "trainer" / "progress.json"

    @property
    def params_file(self) -> Path:
        """Written by the agent, read by the trainer of a sweep's run."""
        return self.run_dir / "params.json"

    @property
    def metrics_file(self) -> Path:
        """On the volume: the curves of a run outlive its machines."""
        return self.logs / "metrics.jsonl"

    def make(self, account: Account | None) -> None:
        """Make every folder a trainer may rely on, and hand it to the trainer's user; again is harmless.

        What is in `checkpoints`, `results` and `keep` follows where the folder was somebody else's (a volume first
        used by another image, whose user had another number); datasets can hold millions of files and are only read,
        so there the folder alone does. `logs` is shared, as /tmp is: there root's files are safe from the trainer.
        SetupFailed where a link of another user's is in a folder's place.
        """
        ours = (self.environments, self.logs, self.checkpoints, self.results, self.keep, self.datasets, self.clone)
        for folder in ours:
            _refuse_link(folder)
        for folder in (self.run_dir, self.fetched.parent, self.environments, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        if account is not None:
            self.logs.chmod(0o1777)
            for folder in (self.run_dir, self.fetched.parent, self.environments):
                folder.chmod(0o755)  # whatever the agent's umask is, the trainer passes through them
        for folder in (self.checkpoints, self.results, self.keep):
            folder.mkdir(parents=True, exist_ok=True)
            if account is not None and folder.stat().st_uid != account.uid:
                give(folder, account)
        if account is not None:
            for _, folders, names, descriptor in untrusted_folders.walk(self.logs):
                for name in (*folders, *names):  # metrics and the ranks' logs, of a trainer that had another number
                    status = untrusted_folders.status_of(descriptor, name)
                    if status is not None and status.st_uid not in (0, account.uid):
                        give(self.logs / name, account)
                folders.clear()  # no folder below is looked at
        for folder in (self.datasets, self.run_dir / "trainer", self.home):
            folder.mkdir(parents=True, exist_ok=True)
            if account is not None:
                os.chown(folder, account.uid, account.gid)


def give(path: Path, account: Account | None) -> None:
    """Make `path` and all below it the account's; links are changed themselves, never followed."""
    if account is not None:
        untrusted_folders.give(path, account.uid, account.gid)


def is_foreign_link(path: Path) -> bool:
    """Whether a link is there that neither root nor we have made."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid())


def _refuse_link(folder: Path) -> None:
    """A volume whose top others may write (`chmod 777`) can hold a trainer's link in a folder's place: what is done to
    the folder would be done to what it names. The machine's owner may have a link of his own there."""
    if is_foreign_link(folder):
        raise SetupFailed(
            f"{folder} is a link that user {folder.lstat().st_uid} made, to {os.readlink(folder)!r}",
            next_step=f"put a folder in its place, or make the link root's (`chown -h root {folder}`)",
        )


def publish(path: Path, text: str, *, durable: bool = False) -> None:
    """Write by rename, readable for every user whatever the agent's umask is: a reader sees all of it or nothing.

    `durable`: a machine that is killed leaves the old text or the new one; else it may leave an empty file.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)  # a pipe of that name, in an environment of `setup`, would hold us up for ever
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with open(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(part, path)
    if durable:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
