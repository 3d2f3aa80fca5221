"""How full the volume is, and which folders have grown, for `fleetctl status`: a full volume ends a run."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spotheal.agent.files import untrusted_folders
from spotheal.agent.protocol.clock import Stop

FULL_PERCENT = 85
LOOK_SECONDS = 600.0  # between two walks over all files
_SHOWN = 3


def percent_used(mount_point: Path) -> int | None:
    """None if nothing is mounted there: a folder of somebody's disk says nothing about a volume."""
    try:
        usage = shutil.disk_usage(mount_point) if os.path.ismount(mount_point) else None
    except OSError:
        return None
    return None if usage is None or not usage.total else round(100 * usage.used / usage.total)


def grown(top: Path, since: float, stop: Stop) -> list[dict[str, Any]]:
    """The folders with the most bytes in files that were written after `since` (seconds since 1970), largest first.

    A folder is one of the volume's, or one of the working copy's own. Ends early at `stop`: a folder that is being read
    keeps the volume busy.
    """
    bytes_by_folder: Counter[str] = Counter()
    for path, status in untrusted_folders.files(top):
        if stop.is_set():
            break
        parts = Path(path).parts[:-1]
        folder = "/".join(parts[: 2 if parts[:1] == ("working-copy",) else 1])
        if status.st_mtime >= since:
            bytes_by_folder[folder] += status.st_blocks * 512
    return [{"folder": folder, "bytes": size} for folder, size in bytes_by_folder.most_common(_SHOWN) if size]


class SpaceWatch:
    """`look` with each heartbeat, until `over`. `note` publishes `space` with the next one, None if there is room."""

    def __init__(self, mount_point: Path, start: float, over: Stop, note: Callable[..., None]) -> None:
        self._mount_point, self._began, self._over, self._note = mount_point, start, over, note
        self._looked = float("-inf")

    def look(self, seconds: float, start_beside: Callable[[str, Callable[[], object]], None]) -> None:
        """`seconds`: monotonic. `beside` runs the walk in a thread, for it may take minutes."""
        percent = percent_used(self._mount_point)
        if percent is None or percent < FULL_PERCENT:
            self._note(space=None)
        elif seconds - self._looked >= LOOK_SECONDS:
            self._looked = seconds
            start_beside("space", lambda: self._walk(percent))

    def _walk(self, percent: int) -> None:
        folders = grown(self._mount_point, self._began, self._over)
        if not self._over.is_set():
            self._note(space={"percent": percent, "grown": folders})
