"""`--keep DIR`: what is left of a rehearsal for the operator to look at.

DIR/volume/                the files of the final volume
DIR/instances/<id>/        user-data.sh, console.log, logs/ (what a person would have seen over SSH)
DIR/store/                 every object of the run's store
DIR/results/               the same of the bucket that stood for that of [store] results
DIR/reference/             the uninterrupted run: its volume and its output
DIR/calls.jsonl            every call to EC2: time, caller, operation, outcome
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import rfc3339
from spotheal.agent.protocol.errors import SpothealError

if TYPE_CHECKING:
    from spotheal.fleet.rehearsal.scenarios.cloud import Cloud
    from spotheal.fleet.rehearsal.scenarios.reference import Reference
    from spotheal.fleet.rehearsal.scenarios.watch import Watch


def keep(
    folder: Path, cloud: Cloud, store: Store, watch: Watch, reference: Reference | None, results: Store | None = None
) -> None:
    """Copy it all; what is not there (a rehearsal that was cut short) is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    volume = watch.final_volume()
    if volume is not None:
        copy(volume, folder / "volume")
    for machine in cloud.machines.all():
        target = folder / "instances" / machine.launch.instance
        target.mkdir(parents=True, exist_ok=True)
        for name in ("user-data.sh", "console.log"):
            copy(machine.folder / name, target / name)
        copy(machine.root / "var/log/spotheal", target / "logs")
    if reference is not None:
        copy(reference.volume, folder / "reference" / "volume")
        copy(reference.console, folder / "reference" / "console.log")
    with (folder / "calls.jsonl").open("w", encoding="utf-8") as file:
        for call in list(cloud.rules.calls):
            line = {"time": rfc3339(call.time), "caller": call.caller, "operation": call.operation}
            file.write(json.dumps({**line, "outcome": call.outcome}) + "\n")
    _copy_store(store, folder / "store")
    if results is not None:
        _copy_store(results, folder / "results")


def _copy_store(store: Store, target: Path) -> None:
    try:
        for key in store.keys(""):
            if not key or key.endswith("/"):
                continue  # a folder, as the S3 console makes it
            path = target / key
            path.parent.mkdir(parents=True, exist_ok=True)
            store.download(key, path)
    except (SpothealError, OSError) as error:  # OSError: S3 takes longer names than a folder does
        (target.parent / "store-incomplete.txt").write_text(f"{error}\n")


def copy(source: Path, target: Path) -> None:
    """A file or a folder; what is not there is left out."""
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=_no_files)
    elif source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def _no_files(folder: str, names: list[str]) -> list[str]:
    """Pipes and sockets, which a trainer may leave and nobody can copy."""
    places = {name: Path(folder, name) for name in names}
    return [name for name, path in places.items() if not (path.is_symlink() or path.is_dir() or path.is_file())]
