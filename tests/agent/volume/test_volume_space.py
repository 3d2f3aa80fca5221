"""A volume that is nearly full: what the agent publishes of it, and what `status` shows."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spotheal.agent.protocol.clock import never
from spotheal.agent.volume import space as volume_space
from spotheal.agent.volume.space import SpaceWatch, grown, percent_used
from spotheal.fleet.status.screen import _space


def write(file: Path, size: int, changed: float = 2000.0) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"x" * size)
    os.utime(file, (changed, changed))


def test_the_folders_that_grew_are_the_volumes_and_the_working_copys_own(tmp_path: Path) -> None:
    sizes = {"checkpoints/a/step-1": 8192, "checkpoints/step-2": 8192, "working-copy/out/last.pt": 65536}
    for name, size in {**sizes, "working-copy/train.py": 4096, "datasets/old.bin": 0}.items():
        write(tmp_path / name, size)
    write(tmp_path / "working-copy/data/old.bin", 1 << 20, changed=500.0)
    (tmp_path / "link").symlink_to("/usr")
    assert [one["folder"] for one in grown(tmp_path, 1000.0, never())] == [
        "working-copy/out", "checkpoints", "working-copy",
    ]  # fmt: skip


def test_a_look_ends_with_the_trainer(tmp_path: Path) -> None:
    write(tmp_path / "checkpoints/step-1", 8192)
    over = threading.Event()
    over.set()
    assert grown(tmp_path, 0.0, over) == []


def test_a_folder_that_is_no_mount_is_not_judged(tmp_path: Path) -> None:
    assert percent_used(tmp_path) is None
    assert percent_used(tmp_path / "none") is None


def test_it_is_published_from_85_percent_on_and_no_longer_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = [84]
    usage = shutil._ntuple_diskusage  # type: ignore[attr-defined]
    monkeypatch.setattr(volume_space.os.path, "ismount", lambda path: True)
    monkeypatch.setattr(volume_space.shutil, "disk_usage", lambda path: usage(100, used[0], 100 - used[0]))
    write(tmp_path / "working-copy/out/last.pt", 8192)
    published: list[Any] = []
    watch = SpaceWatch(tmp_path, 1000.0, never(), lambda space: published.append(space))

    def at_once(name: str, work: Callable[[], object]) -> None:
        work()

    for percent, seconds in ((84, 0.0), (85, 60.0), (86, 120.0), (90, 700.0), (40, 760.0)):
        used[0] = percent
        watch.look(seconds, at_once)
    walked = {"folder": "working-copy/out", "bytes": 8192}
    assert published == [None, {"percent": 85, "grown": [walked]}, {"percent": 90, "grown": [walked]}, None]


def test_status_names_the_folder_that_grew() -> None:
    space = {"percent": 91, "grown": [{"folder": "working-copy/out", "bytes": 61 << 30}]}
    assert _space(space) == "91 % full; this machine wrote: working-copy/out 61.0 GiB"
    assert _space({"percent": 91, "grown": []}) == "91 % full"
