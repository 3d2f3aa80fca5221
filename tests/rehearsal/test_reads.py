"""Which reads count: those of the first content of a file, in the order in which they came."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from spotheal.fleet.rehearsal.machines.reads import Reads


@pytest.fixture
def save(tmp_path: Path) -> Path:
    path = tmp_path / "last.pt"
    path.write_bytes(b"saved by the machine before")
    (tmp_path / "link").hardlink_to(path)
    return path


def watched(save: Path) -> Reads:
    return Reads([save.with_name("link")])


def test_a_read_before_the_next_save_counts_although_no_look_lies_between(save: Path) -> None:
    reads = watched(save)
    save.read_bytes()
    save.write_bytes(b"the next")
    save.read_bytes()
    assert reads.any()
    reads.close()


def test_a_read_of_what_the_script_itself_wrote_does_not_count(save: Path) -> None:
    reads = watched(save)
    save.write_bytes(b"the next")
    save.read_bytes()
    assert not reads.any()
    reads.close()


def test_the_old_content_of_a_replaced_save_still_counts_if_it_is_read(save: Path) -> None:
    reads = watched(save)
    with save.open("rb") as old:
        save.with_name("new").write_bytes(b"the next")
        save.with_name("new").replace(save)
        save.read_bytes()
        assert not reads.any()
        old.read()
    assert reads.any()
    reads.close()


def test_a_read_through_a_map_of_memory_counts(save: Path) -> None:
    reads = watched(save)
    with save.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert reads.any()
    reads.close()
