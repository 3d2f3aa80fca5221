"""What a run remembers of itself on the volume, from one instance to the next: attempts, steps, failures."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from spotheal.agent.files.folders import Folders, publish
from spotheal.agent.protocol import bounded_json

_NAME = "run.json"


@dataclass(frozen=True)
class RunMemory:
    """`attempt`: the last one started. `failures`: in a row, without a step gained between them.

    `requested_at`: of the request that they were counted under. `fleetctl request --resume` makes another one, which
    forgives them: else the first failure after it would end the run again.
    """

    run: str
    attempt: int = 0
    best_step: int | None = None
    saved_step: int | None = None
    failures: int = 0
    final_saves: int = 0  # interruptions that cost no step
    requested_at: str = ""

    @classmethod
    def read(cls, folders: Folders, run: str, requested_at: str = "") -> RunMemory:
        """An empty one where there is none, it cannot be read, or it is another run's (a volume that was adopted)."""
        try:
            document = bounded_json.parse(_path(folders).read_bytes())
        except (OSError, ValueError):
            return cls(run, requested_at=requested_at)
        if not isinstance(document, dict) or document.get("run") != run:
            return cls(run, requested_at=requested_at)
        names = [field.name for field in fields(cls) if field.name not in ("run", "requested_at")]
        numbers = {name: document[name] for name in names if isinstance(document.get(name), int)}
        if document.get("requested_at", "") != requested_at:
            numbers["failures"] = 0
        return cls(run, requested_at=requested_at, **numbers)

    def write(self, folders: Folders, *, durable: bool = True) -> None:
        """Raises OSError where the volume is full or gone. Forgotten attempts would begin a run anew that has a
        `resume_command`; `durable` False leaves it to the unmount that follows, which waits for the disk anyway."""
        publish(_path(folders), json.dumps(asdict(self)), durable=durable)


def _path(folders: Folders) -> Path:
    return folders.private / _NAME
