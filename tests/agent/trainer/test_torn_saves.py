"""Which saves are surely incomplete: real files of each kind, cut everywhere."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from datetime import datetime, timezone
from pathlib import Path

import pytest

from spotheal.agent.files import untrusted_folders
from spotheal.agent.files.folders import Folders
from spotheal.agent.repository.working_copy import Record
from spotheal.agent.trainer.saved_files import SavedFiles
from spotheal.agent.trainer.set_aside import SaveShelf
from spotheal.agent.trainer.torn_saves import anything_saved, torn_saves

NOW = datetime(2026, 11, 21, tzinfo=timezone.utc)


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    folders = Folders.at(tmp_path, "/data")
    folders.make(None)
    return folders


def written(path: Path, content: bytes = b"state") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def a_zip() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 300)
    return file.getvalue()


def a_safetensors() -> bytes:
    header = json.dumps(
        {"__metadata__": {"format": "pt"}, "weight": {"dtype": "F32", "shape": [25], "data_offsets": [0, 100]}}
    ).encode()
    return struct.pack("<Q", len(header)) + header + b"\0" * 100


def an_hdf5(version: int) -> bytes:
    """A superblock and a body, as the HDF5 specification lays them out; its end-of-file address is the length."""
    if version < 2:
        head = b"\x89HDF\r\n\x1a\n" + bytes([version, 0, 0, 0, 0, 8, 8, 0]) + struct.pack("<HHI", 4, 16, 0)
        head += struct.pack("<HH", 32, 0) if version == 1 else b""
    else:
        head = b"\x89HDF\r\n\x1a\n" + bytes([version, 8, 8, 0])
    return (head + struct.pack("<QQQ", 0, (1 << 64) - 1, 400)).ljust(400, b"\0")


KINDS = {
    "model.pt": a_zip(),
    "checkpoint.pth.tar": a_zip(),
    "model.safetensors": a_safetensors(),
    "weights.h5": an_hdf5(0),
    "old.h5": an_hdf5(1),
    "new.h5": an_hdf5(2),
    "newest.h5": an_hdf5(3),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_whole_file_is_never_torn_and_each_cut_is(tmp_path: Path, name: str) -> None:
    content = KINDS[name]
    path = written(tmp_path / name, content)
    assert torn_saves([tmp_path]) == []
    for size in (0, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        whole_end = name.endswith((".pt", ".tar")) and size == len(content) - 1  # the end record is there, less a byte
        assert bool(torn_saves([tmp_path])) != whole_end, size


@pytest.mark.parametrize("kind", ["keras", "torch"])
def test_what_the_real_libraries_write_is_whole_and_torn_if_cut(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.h5"
    if kind == "keras":
        h5py = pytest.importorskip("h5py")
        with h5py.File(path, "w") as file:
            file["weights"] = list(range(1000))
    else:
        torch = pytest.importorskip("torch")
        torch.save({"weights": torch.zeros(1000)}, path)
    assert torn_saves([tmp_path]) == []
    os.truncate(path, path.stat().st_size // 2)
    assert [save.name for save in torn_saves([tmp_path])] == ["model.h5"]


@pytest.mark.parametrize("name", ["run.lock", "__init__.py", "events.out.tfevents.1", "DONE", "notes.txt"])
def test_an_empty_file_that_is_no_save_is_left_alone(tmp_path: Path, name: str) -> None:
    written(tmp_path / name, b"")
    assert torn_saves([tmp_path]) == []


@pytest.mark.parametrize(
    "content",
    [b"PK", b"\x89HDF\r\n\x1a\n", b"\x89HDF\r\n\x1a\n\xff" * 9, b"\xff" * 64, b"\2" + b"\0" * 7 + b"[]" * 9,
     struct.pack("<Q", 60_000) + b"[" * 60_000, struct.pack("<Q", 9) + b'{"a": 17}'],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_not_surely_torn(tmp_path: Path, content: bytes) -> None:
    written(tmp_path / "odd.safetensors", content)
    written(tmp_path / "odd.bin", content)
    assert [save for save in torn_saves([tmp_path]) if "without its end" not in save.reason] == []
    assert not any(save.name == "odd.bin" for save in torn_saves([tmp_path]))


def test_a_folder_that_lacks_what_each_older_one_has_is_torn(tmp_path: Path) -> None:
    """foreign.md F6: Trainer was killed in the midst of checkpoint-30; the whole checkpoint-20 was set aside."""
    for step in (5, 10, 20):
        written(tmp_path / f"checkpoint-{step}/model.safetensors", a_safetensors())
        written(tmp_path / f"checkpoint-{step}/rng_state_{step % 3}.pth", a_zip())
    written(tmp_path / "checkpoint-5/only-here.json")
    (tmp_path / "checkpoint-30").mkdir()
    assert [str(save) for save in torn_saves([tmp_path])] == ["checkpoint-30 (is an empty folder)"]
    written(tmp_path / "checkpoint-30/model.safetensors", a_safetensors())
    assert [str(save) for save in torn_saves([tmp_path])] == [
        "checkpoint-30 (lacks rng_state_0.pth, which checkpoint-20 has)"
    ]
    written(tmp_path / "checkpoint-30/rng_state_7.pth", a_zip())
    assert torn_saves([tmp_path]) == []


def test_versions_of_a_log_folder_and_old_saves_that_were_thinned_out_are_not_torn(tmp_path: Path) -> None:
    written(tmp_path / "lightning_logs/version_0/metrics.csv")
    (tmp_path / "lightning_logs/version_1").mkdir()
    written(tmp_path / "step-1/model.pt", a_zip())
    written(tmp_path / "step-2/model.pt", a_zip())
    written(tmp_path / "step-2/optimizer.pt", a_zip())
    assert torn_saves([tmp_path]) == []


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        ("last.pt", "last.pt"),
        ("checkpoint-500/optimizer.pt", "checkpoint-500"),
        ("run-1/global_step20/zero/rank0.pt", "run-1-global_step20"),
        ("lightning_logs/version_3/checkpoints/epoch=3.ckpt", "lightning_logs-version_3-checkpoints-epoch=3.ckpt"),
    ],
)
def test_a_checkpoint_is_set_aside_whole_and_can_be_put_back(folders: Folders, name: str, moved: str) -> None:
    folder = folders.checkpoints
    written(folder / "other.pt")
    torn = written(folder / name, b"")
    (save,) = torn_saves([folder])
    aside = SaveShelf(folders).add(save, NOW)
    assert aside.moved == folder.parent / "set-aside" / f"2026-11-21T000000Z-checkpoints-{moved}"
    assert aside.moved.exists() and not torn.exists()
    assert aside.put_back() and torn.exists()
    assert not aside.put_back()


def test_links_are_not_followed(tmp_path: Path) -> None:
    written(tmp_path / "elsewhere/last.pt", b"")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/link.pt").symlink_to(tmp_path / "elsewhere/last.pt")
    (tmp_path / "checkpoints/checkpoint-3").symlink_to(tmp_path / "elsewhere")
    assert torn_saves([tmp_path / "checkpoints"]) == []


def test_only_a_file_with_content_can_be_resumed_from(tmp_path: Path) -> None:
    checkpoints, keep = tmp_path / "checkpoints", tmp_path / "keep"
    assert not anything_saved(checkpoints, keep)
    written(checkpoints / "last.pt", b"")
    written(keep / "data/train.csv")
    assert not anything_saved(checkpoints, keep)
    written(keep / "out/ckpt.pt")
    assert anything_saved(checkpoints, keep)


def test_two_saves_of_one_name_do_not_replace_each_other_aside(folders: Folders) -> None:
    shelf = SaveShelf(folders)
    for _ in range(3):
        torn = written(folders.checkpoints / "a" / "last.pt", b"")
        (save,) = torn_saves([folders.checkpoints])
        shelf.add(save, NOW)
        assert not torn.exists()
    assert 3 == len({aside.moved for aside in shelf.saves})


def test_what_an_agent_set_aside_before_it_was_killed_is_put_back_by_the_next(folders: Folders) -> None:
    torn = [written(folder / "a\udcff.pt", b"") for folder in (folders.checkpoints, folders.keep)]
    before = SaveShelf(folders)
    for save in torn_saves([folders.checkpoints, folders.keep]):
        before.add(save, NOW)
    after = SaveShelf(folders)
    after.recall(lambda moment: moment != NOW.timestamp())
    assert after.saves == before.saves
    after.put_back(lambda aside: None)
    assert all(path.exists() for path in torn)
    again = SaveShelf(folders)
    again.recall(lambda moment: False)
    assert not again.saves


def test_nothing_is_put_back_after_the_start_without_it_gained_a_step(folders: Folders) -> None:
    written(folders.checkpoints / "last.pt", b"")
    shelf = SaveShelf(folders)
    shelf.add(torn_saves([folders.checkpoints])[0], NOW)
    later = SaveShelf(folders)
    later.recall(lambda moment: True)
    assert not later.saves
    later.recall(lambda moment: False)
    assert not later.saves


def test_a_save_is_not_put_back_through_a_link_of_the_trainers(folders: Folders, tmp_path: Path) -> None:
    torn = written(folders.checkpoints / "run-1" / "last.pt", b"")
    shelf = SaveShelf(folders)
    aside = shelf.add(torn_saves([folders.checkpoints])[0], NOW)
    torn.parent.rmdir()
    torn.parent.symlink_to(tmp_path)
    assert not aside.put_back() and not (tmp_path / "last.pt").exists()


def test_a_folder_of_code_with_a_number_in_its_name_is_no_checkpoint(tmp_path: Path) -> None:
    """One empty file took a whole training stage away, with its script and every good checkpoint."""
    written(tmp_path / "step3-rlhf/train.py")
    written(tmp_path / "step3-rlhf/out/good.pt", a_zip())
    written(tmp_path / "step3-rlhf/out/last.pt", b"")
    assert [save.name for save in torn_saves([tmp_path])] == ["step3-rlhf/out/last.pt"]


def test_next_to_the_code_only_the_trainers_own_saves_count(tmp_path: Path) -> None:
    folders = Folders.at(tmp_path, "/v")
    copy = folders.clone
    for number in range(3):
        written(copy / f"data/step{number}/frame.png")
        written(copy / f"data/step{number}/label.json")
    written(copy / "data/step3/frame.png")  # its last item has no label
    for name in ("venv/lib/x.npy", "assets/empty.pt", "cache/x.bin", "data/x.pt", "checkpoints/epoch1/train.py"):
        written(copy / name, b"")
    written(copy / "checkpoints/epoch1/last.pt", b"")
    written(copy / "out/last.pt", b"")
    folders.environments.mkdir(parents=True)
    Record("R", "", {}, {"checkpoints/epoch1/train.py": "x"}).write(folders.environments / "working-copy.json")
    assert [save.name for save in SavedFiles(folders).torn()] == ["out/last.pt"]


def test_a_look_for_saves_next_to_the_code_asks_for_the_status_of_no_other_file(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a moved volume each first status is a read of milliseconds, and the trainer's start waits for this look."""
    asked: list[str] = []

    def status_of(here: int, name: str) -> os.stat_result | None:
        asked.append(name)
        return status(here, name)

    status = untrusted_folders.status_of
    for name in ("train.py", "package/module.py", "data/big.bin", "out/last.pt"):
        written(folders.clone / name)
    monkeypatch.setattr(untrusted_folders, "status_of", status_of)
    assert SavedFiles(folders).anything()
    assert asked == ["last.pt"]
