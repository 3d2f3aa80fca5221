"""The store: what goes in comes out, in slots, and nothing else is ever taken for it."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from checkpoint_faults import step_in, tree_of

from spotheal.training.checkpoint import Outcome, Store
from spotheal.training.slotfile import format, packing
from spotheal.training.slotfile.checksum import checksum
from spotheal.training.slotfile.files import Files
from spotheal.training.slotfile.slots import read, read_header


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints")


def steps(store: Store) -> list[int]:
    return [step for step, _ in store.slots.found()]


# --------------------------------------------------------------------------------------------------- in and out
def everything() -> dict[str, Any]:
    import numpy

    floats = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    ints = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
    return {
        "tensors": {str(dtype): torch.arange(7).to(dtype) for dtype in floats + ints},
        "bool": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j], dtype=torch.complex64),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "channels last": torch.arange(48.0).view(1, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "slice": torch.arange(100)[10:90:3],
        "optimizer": {"state": {0: {"step": torch.tensor(2.0)}, 1: {}}, "param_groups": [{"betas": (0.9, 0.999)}]},
        "plain": [None, True, 2**80, 1e-300, 0.1 + 0.2, "text \u2028", b"\x00\xff", (), {3, 1}, {"$tensor": 1}],
        "not finite": [float("inf"), float("-inf")],
        "numpy": {"array": numpy.arange(5, dtype="float64"), "number": numpy.float64(0.1), "whole": numpy.int32(4)},
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if type(one).__module__ == "numpy" and one.shape:
        return bool(one.dtype == other.dtype and (one == other).all())
    return bool(one == other)


def test_every_kind_of_value_comes_back_as_it_was(store: Store) -> None:
    store.save_now(3, everything(), info={"epoch": 1})
    loaded = store.load()
    assert loaded is not None
    assert (loaded.step, loaded.info) == (3, {"epoch": 1})
    assert same(everything(), loaded.tree)


def test_any_safetensors_reader_opens_it(store: Store) -> None:
    safetensors = pytest.importorskip("safetensors")
    outcome = store.save_now(3, everything())
    assert outcome.path is not None
    with safetensors.safe_open(outcome.path, "pt") as file:
        assert file.metadata()["step"] == "3"
        assert torch.equal(file.get_tensor("transposed"), torch.arange(12.0).view(3, 4).t())
        assert set(file.keys()) - {format.PADDING} == set(packing.pack(everything())[0])


@pytest.mark.parametrize("value", [lambda: 0, object(), torch.nn.Linear(1, 1), torch.eye(2).to_sparse()])
def test_what_needs_code_to_be_loaded_is_refused_at_the_save(value: Any, store: Store) -> None:
    with pytest.raises(packing.UnsavableState, match=r"^a/1 is a"):
        store.save(1, {"a": [0, value]})


def test_tied_and_overlapping_tensors_each_come_back_whole(store: Store) -> None:
    base = torch.arange(10.0)
    store.save_now(1, {"a": base, "b": base, "c": base[2:5]}, later=[base])
    loaded = store.load()
    assert loaded is not None
    assert same({"a": base, "b": base, "c": base[2:5]}, loaded.tree)


# -------------------------------------------------------------------------------------------------------- slots
def test_three_slots_are_overwritten_in_place(store: Store) -> None:
    inodes = set()
    for step in range(1, 10):
        path = store.save_now(step, tree_of(step)).path
        assert path is not None
        inodes.add(path.stat().st_ino)
        assert steps(store) == list(range(step, max(0, step - 3), -1))
    assert len(inodes) == 3
    assert sorted(path.name for path in store.folder.iterdir()) == [path.name for _, path in store.slots.found()][::-1]


def test_the_best_and_milestones_are_kept_beside_the_slots(store: Store) -> None:
    for step in range(1, 9):
        store.save_now(step, tree_of(step), best=step in (2, 3), milestone=step == 4)
    best = store.load_best()
    assert best is not None
    assert (best.step, step_in(best.tree)) == (3, 3)
    assert [step for step, _ in store.milestones.found()] == [4]
    assert steps(store) == [8, 7, 6]


def test_a_larger_state_takes_the_place_of_a_smaller_one(store: Store) -> None:
    for step, size in enumerate((10, 5000, 100, 20_000, 3), start=1):
        store.save_now(step, tree_of(step, size))
        loaded = store.load()
        assert loaded is not None
        assert step_in(loaded.tree) == step


def test_saving_a_step_again_never_gives_up_the_one_that_is_there(store: Store) -> None:
    for step in (1, 2, 3):
        store.save_now(step, tree_of(step))

    class Stops(Files):
        def truncate(self, fd: int, size: int) -> None:
            raise OSError(5, "the disk is gone")

    failing = Store(store.folder, files=Stops())
    failing.save(3, tree_of(3))
    failing.flush()
    assert steps(store)[0] == 3


def test_a_slot_half_written_by_a_killed_process_is_used_again(store: Store) -> None:
    for step in (1, 2, 3):
        store.save_now(step, tree_of(step))
    os.rename(store.slots.path(1), store.slots.temporary)
    store.save_now(4, tree_of(4))
    assert steps(store) == [4, 3, 2]
    assert not store.slots.temporary.exists()


# -------------------------------------------------------------------------------------------------- while training
class Gate(Files):
    """Holds the first fsync until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def fsync(self, fd: int) -> None:
        assert self.open.wait(20)
        super().fsync(fd)


def test_a_save_while_one_is_pending_is_declined_at_once(tmp_path: Path) -> None:
    gate, ends = Gate(), []
    store = Store(tmp_path, files=gate, on_end=ends.append)
    assert store.save(1, tree_of(1))
    assert not store.save(2, tree_of(2))
    assert store.ended() is None
    assert ends == []
    gate.open.set()
    outcome = store.flush()
    assert isinstance(outcome, Outcome)
    assert ends == [outcome]
    assert steps(store) == [1]


def test_what_changes_after_the_save_is_not_in_it(tmp_path: Path) -> None:
    """Buffers are copied before `save` returns; what only the optimizer changes, before `wait_copied` does."""
    gate = Gate()
    store = Store(tmp_path, files=gate, chunk_bytes=4096)
    weights, running_mean = torch.zeros(1 << 20), torch.zeros(1 << 10)
    store.save(1, {"weights": weights, "running_mean": running_mean}, later=[weights])
    running_mean.fill_(1)
    store.wait_copied()
    weights.fill_(1)
    gate.open.set()
    store.flush()
    loaded = store.load()
    assert loaded is not None
    assert not loaded.tree["weights"].any()
    assert not loaded.tree["running_mean"].any()


# ----------------------------------------------------------------------------------------------------- broken files
@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, bytes, Path]:
    """A folder with steps 1 and 2, and step 2's content and path."""
    store = Store(tmp_path / "two", chunk_bytes=4096)
    for step in (1, 2):
        store.save_now(step, tree_of(step, 2000))
    path = store.slots.path(2)
    return store.folder, path.read_bytes(), path


def falls_back(folder: Path, path: Path, content: bytes) -> str:
    """What is said to be wrong with `content` as the newest checkpoint, once the one before it has been taken."""
    path.write_bytes(content)
    store = Store(folder)
    loaded = store.load()
    assert loaded is not None
    assert (loaded.step, step_in(loaded.tree)) == (1, 1)
    ((aside, what),) = store.set_aside
    assert aside.name.startswith("broken-step-")
    assert aside.read_bytes() == content
    aside.unlink()
    return what


def test_a_thousand_flipped_bits_are_all_found(two: tuple[Path, bytes, Path]) -> None:
    folder, content, path = two
    randomly = random.Random(3)
    head = 8 * format.header_length(content[:8], len(content))
    places = [randomly.randrange(head) for _ in range(500)] + [randomly.randrange(8 * len(content)) for _ in range(500)]
    for place in places:
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        assert falls_back(folder, path, bytes(flipped))


def test_every_truncation_is_found(two: tuple[Path, bytes, Path]) -> None:
    folder, content, path = two
    assert falls_back(folder, path, content[:-1])
    path.write_bytes(content)
    for size in reversed(range(len(content))):
        os.truncate(path, size)
        with pytest.raises(format.BrokenCheckpoint):
            read(path)
    assert falls_back(folder, path, content + b"\0")


def test_blocks_that_are_zeroed_stale_or_exchanged_are_found(two: tuple[Path, bytes, Path]) -> None:
    folder, content, path = two
    at = len(content) - 8192
    one, other = content[at : at + 4096], content[at + 4096 :]
    stale = (folder / path.name.replace("2", "1")).read_bytes()[at : at + 4096]
    for spoiled in (bytes(4096) + other, one + bytes(4096), other + one, stale + other):
        assert "checksum" in falls_back(folder, path, content[:at] + spoiled)


def test_what_is_wrong_is_said(two: tuple[Path, bytes, Path], caplog: pytest.LogCaptureFixture) -> None:
    folder, _, path = two
    assert falls_back(folder, path, b"") == "it has 0 bytes, too few for a header"
    assert falls_back(folder, path, bytes(4096)) == "its header is empty: it was never committed"
    assert "step-000000002.safetensors is broken: its header is empty" in caplog.text


def header_of(body: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(body).encode()
    return struct.pack("<Q", len(text)) + text + data


HOSTILE = {
    "pickle": pickle.dumps({"model": 1}),
    "huge header": struct.pack("<Q", 2**60) + b"{}",
    "header beyond the file": struct.pack("<Q", 5000) + b"{}",
    "not json": struct.pack("<Q", 4) + b"\xff\xfe\x00{",
    "deep json": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "foreign safetensors": header_of({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_set_aside(name: str, two: tuple[Path, bytes, Path]) -> None:
    folder, _, path = two
    assert falls_back(folder, path, HOSTILE[name])


def forged(content: bytes, change: Any) -> bytes:
    """`content` with its header changed and every checksum of it right: what an attacker can make."""
    length = format.header_length(content[:8], len(content))
    body = json.loads(content[8:length])
    body = change(body) or body
    metadata = body.pop("__metadata__")
    rest = {key: value for key, value in metadata.items() if key not in ("spotheal", "header_crc32")}
    text = format._BEGIN + b'00000000",' + json.dumps(rest)[1:].encode()
    text += b"," + json.dumps(body)[1:].encode()
    whole = bytearray(struct.pack("<Q", length - 8) + text.ljust(length - 8))
    import zlib

    whole[format._CRC_AT : format._CRC_AT + 8] = b"%08x" % zlib.crc32(whole)
    return bytes(whole) + content[length:]


def _overlap(body: dict[str, Any]) -> None:
    body["model/weight"]["data_offsets"] = [0, 12]
    body["model/weight"]["shape"] = [3]


def _outside(body: dict[str, Any]) -> None:
    body["model/weight"]["data_offsets"] = [0, 2**50]
    body["model/weight"]["shape"] = [2**48]


def _negative(body: dict[str, Any]) -> None:
    body["model/weight"]["shape"] = [-1, -2000]


def _strange_type(body: dict[str, Any]) -> None:
    body["model/weight"]["dtype"] = "os.system"


def _missing(body: dict[str, Any]) -> None:
    body["__metadata__"]["state"] = '{"$tensor":"../../etc/passwd"}'


def _unknown_mark(body: dict[str, Any]) -> None:
    body["__metadata__"]["state"] = '{"$import":"os"}'


def _other_step(body: dict[str, Any]) -> None:
    body["__metadata__"]["step"] = "99"


@pytest.mark.parametrize("change", [_overlap, _outside, _negative, _strange_type, _missing, _unknown_mark, _other_step])
def test_a_forged_header_is_set_aside(change: Any, two: tuple[Path, bytes, Path]) -> None:
    folder, content, path = two
    assert falls_back(folder, path, forged(content, change))


def test_a_forged_header_that_changes_nothing_is_taken(two: tuple[Path, bytes, Path]) -> None:
    """Checks the check: it is not the forging that is found."""
    folder, content, path = two
    path.write_bytes(forged(content, lambda body: None))
    loaded = Store(folder).load()
    assert loaded is not None
    assert loaded.step == 2


def test_links_pipes_and_folders_are_never_opened_as_checkpoints(tmp_path: Path) -> None:
    store = Store(tmp_path / "checkpoints")
    good = store.save_now(1, tree_of(1)).path
    assert good is not None
    (store.folder / "step-000000002.safetensors").symlink_to(good)
    os.mkfifo(store.folder / "step-000000003.safetensors")
    (store.folder / "step-000000004.safetensors").mkdir()
    (store.folder / "step-000000005.safetensors").symlink_to("/dev/zero")
    loaded = store.load()
    assert loaded is not None
    assert loaded.step == 1
    assert len(store.set_aside) == 4


def test_a_link_where_the_next_slot_is_written_is_not_followed(tmp_path: Path) -> None:
    store = Store(tmp_path / "checkpoints")
    (tmp_path / "victim").write_text("mine")
    store.slots.temporary.symlink_to(tmp_path / "victim")
    store.save_now(1, tree_of(1))
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_folder_without_a_checkpoint_loads_none(store: Store) -> None:
    assert store.load() is None
    (store.folder / "notes.txt").write_text("x")
    (store.folder / "step-abc.safetensors").write_text("x")
    assert store.load() is None
    assert store.set_aside == []


def test_the_header_alone_tells_step_and_info(store: Store) -> None:
    store.save_now(7, tree_of(7), info={"epoch": 2})
    header = read_header(store.slots.path(7))
    assert (header.step, header.info, store.newest_info()) == (7, {"epoch": 2}, {"epoch": 2})


def test_the_checksum_is_the_same_with_and_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randint(0, 256, (4096 * 130,), dtype=torch.uint8)
    one = checksum(data)
    monkeypatch.setattr("spotheal.training.slotfile.checksum._NUMPY", False)
    assert checksum(data) == one
    assert checksum(data[:0]) == 0


def test_a_store_knows_what_a_save_took_from_the_training(store: Store) -> None:
    """Of that the pace makes its interval: not the call alone, the work behind the training as well."""
    assert store.taken_seconds == 0
    store.save_now(1, {"weights": torch.ones(4 << 20)})
    assert 0 < store._worked_seconds < 60
    assert store.taken_seconds > store._held_seconds > 0
