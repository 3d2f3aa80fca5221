"""Sets of shards on the disk: what is broken is found and set aside, what is hostile runs nothing, the rest is kept."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from spotheal.agent.protocol.errors import SpothealError
from spotheal.training.checkpoint import SaveFailed
from spotheal.training.sharded import ShardedStore
from spotheal.training.shards.sharded_manifest import Manifest, ShardFile
from spotheal.training.shards.sharded_sets import Sets
from spotheal.training.slotfile.files import Files
from spotheal.training.slotfile.format import BrokenCheckpoint

pytestmark = pytest.mark.torch


def tree(step: int) -> dict[str, Any]:
    values = torch.arange(3000, dtype=torch.float32).reshape(100, 30) + step
    return {"model": {"weight": values, "count": torch.tensor(step)}, "lr": 0.1 * step, "order": (step, None)}


@pytest.fixture
def store(tmp_path: Path) -> ShardedStore:
    return ShardedStore(tmp_path / "sets")


def steps(store: ShardedStore) -> list[int]:
    return [step for step, _ in store.sets.found()]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, other))
    if isinstance(one, dict):
        return bool(one.keys() == other.keys()) and all(same(one[name], other[name]) for name in one)
    return bool(one == other)


def test_what_is_saved_is_loaded_and_three_sets_are_kept(store: ShardedStore) -> None:
    assert store.load(dict) is None
    for step in range(1, 6):
        store.save_now(step, tree(step), own={"rng": step}, info={"of": step})
    assert steps(store) == [5, 4, 3]
    loaded = store.load(dict)
    assert loaded is not None
    assert (loaded.step, loaded.info, loaded.own, loaded.world) == (5, {"of": 5}, {"rng": 5}, 1)
    assert same(loaded.tree, tree(5))


def test_a_rank_file_is_safetensors_that_any_reader_opens(store: ShardedStore) -> None:
    safetensors = pytest.importorskip("safetensors")
    path = store.save_now(1, tree(1)).path
    assert path is not None
    with safetensors.safe_open(path / "rank-00000.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("model/weight"), tree(1)["model"]["weight"])


def test_a_step_saved_again_is_a_set_of_its_own_and_the_newer_one_counts(store: ShardedStore) -> None:
    store.save_now(7, tree(7))
    store.save_now(7, tree(8))
    loaded = store.load(dict)
    assert loaded is not None
    assert (loaded.step, steps(store)) == (7, [7, 7])
    assert same(loaded.tree, tree(8))


def test_old_files_are_overwritten_in_place(store: ShardedStore) -> None:
    first = store.save_now(1, tree(1)).path
    assert first is not None
    inode = (first / "rank-00000.safetensors").stat().st_ino
    for step in (2, 3, 4):
        store.save_now(step, tree(step))
    assert (store.folder / "step-000000004" / "rank-00000.safetensors").stat().st_ino == inode


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "commit.json"])
def test_every_flipped_bit_and_every_truncation_is_found_and_the_set_before_is_used(
    name: str, store: ShardedStore, tmp_path: Path
) -> None:
    for step in (1, 2):
        store.save_now(step, tree(step))
    shutil.copytree(store.folder, tmp_path / "good")
    size = (store.folder / "step-000000002" / name).stat().st_size
    chance = random.Random(1)
    flips = [("flip", chance.randrange(size * 8)) for _ in range(40)]
    cuts = [("cut", size * part // 10) for part in range(10)]
    for kind, place in [*flips, *cuts]:
        target = ShardedStore(tmp_path / "tried")
        shutil.copytree(tmp_path / "good", target.folder, dirs_exist_ok=True)
        path = target.folder / "step-000000002" / name
        content = bytearray(path.read_bytes())
        if kind == "flip":
            content[place // 8] ^= 1 << place % 8
        path.write_bytes(content if kind == "flip" else content[:place])
        loaded = target.load(dict)
        assert loaded is not None, (kind, place)
        assert loaded.step == 1, (kind, place)
        assert same(loaded.tree, tree(1))
        assert [path.name for path, _ in target.set_aside] == ["broken-step-000000002"]
        target.close()
        shutil.rmtree(target.folder)


def test_a_file_of_another_set_is_not_taken_for_one_of_this(store: ShardedStore) -> None:
    paths = [store.save_now(step, tree(step)).path for step in (1, 2)]
    assert paths[0] is not None
    assert paths[1] is not None
    shutil.copy(paths[0] / "rank-00000.safetensors", paths[1])
    loaded = store.load(dict)
    assert loaded is not None
    assert loaded.step == 1
    assert "not the file that was committed" in store.set_aside[0][1]


def test_a_set_without_its_mark_or_with_a_file_gone_is_set_aside(store: ShardedStore) -> None:
    for step in (1, 2, 3):
        store.save_now(step, tree(step))
    (store.folder / "step-000000003" / "commit.json").unlink()
    (store.folder / "step-000000002" / "rank-00000.safetensors").unlink()
    loaded = store.load(dict)
    assert loaded is not None
    assert loaded.step == 1
    assert [path.name for path, _ in store.set_aside] == ["broken-step-000000003", "broken-step-000000002"]




class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_pickles_in_the_place_of_any_file_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = ShardedStore("sets", slots=4)
    store.save_now(1, tree(1))
    for step, name in enumerate(("commit.json", "rank-00000.safetensors", ".metadata"), 2):
        path = store.save_now(step, tree(step)).path
        assert path is not None
        (path / name).write_bytes(pickle.dumps(Bomb()))
    loaded = store.load(dict)
    assert loaded is not None
    assert loaded.step == 4  # torch's own metadata file is not looked at, whatever is in it
    shutil.rmtree(loaded.path)
    loaded = store.load(dict)
    assert loaded is not None
    assert loaded.step == 1
    assert not (tmp_path / "ran").exists()


def test_links_and_pipes_are_not_followed(store: ShardedStore, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        store.save_now(step, tree(step))
    mark = store.folder / "step-000000003" / "commit.json"
    mark.unlink()
    os.mkfifo(mark)
    shard = store.folder / "step-000000002" / "rank-00000.safetensors"
    os.rename(shard, tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    (store.folder / "step-000000009").symlink_to(tmp_path)
    loaded = store.load(dict)
    assert loaded is not None
    assert loaded.step == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda body: body["tensors"]["model/weight"][2][0].__setitem__(2, 9), "rank 9 of 1"),
        (lambda body: body["tensors"]["model/weight"][2][0][1].__setitem__(0, 99), "do not make up"),
        (lambda body: body["tensors"]["model/weight"][2][0][0].__setitem__(0, 5), "leaves its tensor"),
        (lambda body: body["tensors"]["model/weight"].__setitem__(1, [1] * 65), "a shape that no tensor has"),
        (lambda body: body["tensors"]["model/weight"].__setitem__(1, [2**40, 2**40, 0]), "a shape that no tensor has"),
        (lambda body: body["tensors"]["model/weight"].__setitem__(0, "OBJECT"), "type 'OBJECT'"),
        (lambda body: body.__setitem__("files", []), "0 files"),
        (lambda body: body.__setitem__("step", -3), "no size"),
        (lambda body: body.pop("state"), "state"),
    ],
)
def test_a_mark_that_makes_no_sense_is_refused_although_its_checksum_is_right(
    change: Any, said: str, store: ShardedStore
) -> None:
    path = store.save_now(1, tree(1)).path
    assert path is not None
    body = json.loads((path / "commit.json").read_bytes())
    change(body)
    with pytest.raises(BrokenCheckpoint, match=said):
        Manifest.parse(signed(body))


def signed(body: dict[str, Any]) -> bytes:
    import zlib

    head = {"spotheal_shards": body.pop("spotheal_shards"), "crc32": "00000000"}
    body.pop("crc32", None)
    whole = json.dumps(head | body, separators=(",", ":")).encode()
    return whole.replace(b'"crc32":"00000000"', b'"crc32":"%08x"' % zlib.crc32(whole), 1)


class Recorded(Files):
    """Fails operation number `at` with EIO; counts them."""

    def __init__(self, at: int = 0) -> None:
        self.at, self.done = at, 0

    def _count(self) -> None:
        self.done += 1
        if self.done == self.at:
            raise OSError(5, "Input/output error")

    def write(self, fd: int, data: memoryview | bytes, offset: int) -> None:
        self._count()
        super().write(fd, data, offset)

    def fsync(self, fd: int) -> None:
        self._count()
        super().fsync(fd)

    def rename(self, old: Path, new: Path) -> None:
        self._count()
        super().rename(old, new)


def test_a_fault_at_any_operation_acknowledges_nothing_and_leaves_the_sets_before_it(tmp_path: Path) -> None:
    good = ShardedStore(tmp_path / "sets", slots=2)
    for step in (1, 2):
        good.save_now(step, tree(step))
    counted = Recorded()
    shutil.copytree(good.folder, tmp_path / "counted")
    ShardedStore(tmp_path / "counted", slots=2, files=counted).save_now(3, tree(3))
    assert counted.done > 8
    for at in range(1, counted.done + 1):
        folder = tmp_path / f"at-{at}"
        shutil.copytree(good.folder, folder)
        store = ShardedStore(folder, slots=2, files=Recorded(at))
        with pytest.raises(SaveFailed, match="rank 0: Input/output error"):
            store.save_now(3, tree(3))
        loaded = ShardedStore(folder).load(dict)
        assert loaded is not None
        assert loaded.step in (2, 3)  # 3 where only the last fsync failed: it is whole, and was not promised
        assert same(loaded.tree, tree(loaded.step))
        assert store.save_now(4, tree(4)).path is not None


def test_a_state_that_would_need_code_is_refused_with_its_place(store: ShardedStore) -> None:
    with pytest.raises(SpothealError, match="model/loss is a function"):
        store.save(1, {"model": {"loss": same}})
    assert not store.busy


# ------------------------------------------------------------------------------------------------- on several machines
class OldNames(Files):
    """Another machine's NFS client: the name of a folder goes on meaning what it meant when it was first looked for."""

    def __init__(self) -> None:
        self.known: dict[Path, int] = {}

    def create(self, path: Path) -> int:
        folder = path.parent
        if folder not in self.known:
            self.known[folder] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        return os.open(path.name, os.O_RDWR | os.O_CREAT, 0o644, dir_fd=self.known[folder])


def committed(sets: Sets, other: Files, step: int) -> Path:
    """A set of two ranks, the second of which is on another machine."""
    temporary, files = sets.folder / sets.free(2, 9), []
    for rank, machine in enumerate((sets.files, other)):
        fd = machine.create(temporary / Sets.file(rank))
        machine.truncate(fd, 0)
        machine.write(fd, b"x" * step, 0)
        machine.close(fd)
        files.append(ShardFile(step, "00000000"))
    return sets.commit(temporary, Manifest(step, tuple(files), {}, None, None))


def test_a_machine_that_goes_on_with_old_names_writes_into_no_set_of_before(tmp_path: Path) -> None:
    sets, other = Sets(tmp_path, 3, Files()), OldNames()
    paths = [committed(sets, other, step) for step in range(1, 7)]
    assert [step for step, _ in sets.found()] == [6, 5, 4]
    assert [(path / Sets.file(1)).read_bytes() for path in paths[3:]] == [b"x" * 4, b"x" * 5, b"x" * 6]


def test_that_machine_would_write_into_the_set_before_if_names_came_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the check."""
    monkeypatch.setattr("spotheal.training.shards.sharded_sets.secrets.token_hex", lambda _: "0")
    sets, other = Sets(tmp_path, 3, Files()), OldNames()
    first = committed(sets, other, 1)
    with pytest.raises(FileNotFoundError):
        committed(sets, other, 2)
    assert (first / Sets.file(1)).read_bytes() == b"xx"


def test_the_name_of_a_broken_set_is_not_used_again(tmp_path: Path) -> None:
    sets = Sets(tmp_path, 3, Files())
    broken = committed(sets, Files(), 7)
    assert sets.set_aside(broken).name == "broken-step-000000007"
    assert committed(sets, Files(), 7).name == "step-000000007-1"


def test_what_a_save_has_left_that_died_is_removed_and_never_written_to_again(tmp_path: Path) -> None:
    sets = Sets(tmp_path, 3, Files())
    (tmp_path / ".step.tmp").symlink_to(tmp_path)
    left = tmp_path / sets.free(2, 9)
    fd = sets.files.create(left / Sets.file(1))
    path = committed(sets, Files(), 3)
    os.write(fd, b"late")
    os.close(fd)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert (path / Sets.file(1)).read_bytes() == b"xxx"


def test_a_step_older_than_a_set_that_lies_there_gets_no_folder(tmp_path: Path) -> None:
    """A load takes the highest step: what was acknowledged below it would never be found."""
    sets = Sets(tmp_path, 3, Files())
    committed(sets, Files(), 9)
    with pytest.raises(OSError, match="step 9 lies there"):
        sets.free(2, 8)
    assert sets.free(2, 9).startswith(".step-")
