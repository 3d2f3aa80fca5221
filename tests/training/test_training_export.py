"""The final weights: what a strict load_state_dict takes, in any reader's hands, whole or not there."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from checkpoint_faults import FailingFiles
from torch import nn

from spotheal.training.example.export import export

pytestmark = pytest.mark.torch


class Tied(nn.Module):
    """Two names of one tensor, as of an embedding and its output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        self.out.weight = self.into.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros(0, 5, dtype=torch.int64))
        self.register_buffer("turned", torch.arange(6.0, dtype=torch.float16).reshape(2, 3).t())
        self.register_buffer("flags", torch.tensor([True, False, True]))


def test_the_exported_weights_are_loaded_strictly_by_another_model(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, other = Tied(), Tied()
    path = tmp_path / "new" / "model.safetensors"
    digest = export(path, model.state_dict(), {"step": 7})
    loaded = safetensors.load_file(path)
    other.load_state_dict(loaded)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded[name]) and tensor.dtype == loaded[name].dtype
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "7"}
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_the_same_content_gives_the_same_bytes_in_whatever_order_it_comes(tmp_path: Path) -> None:
    weights = {"b": torch.arange(5.0), "a": torch.arange(3, dtype=torch.uint8), "c": torch.ones(2, 2)}
    turned = dict(reversed(weights.items()))
    assert export(tmp_path / "one", weights, {"x": 1, "y": 2}) == export(tmp_path / "two", turned, {"y": 2, "x": 1})


def test_a_file_larger_than_a_piece_and_a_rest_that_is_longer_than_it(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    (tmp_path / ".weights.tmp").write_bytes(b"left by a crash" * 2_000_000)
    weights = {"large": torch.arange((9 << 20) // 4 + 1, dtype=torch.int32)}
    export(tmp_path / "weights", weights, {})
    assert torch.equal(safetensors.load_file(tmp_path / "weights")["large"], weights["large"])


def test_weights_that_cannot_be_written_leave_those_from_before(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    export(path, {"a": torch.zeros(3)}, {})
    before = path.read_bytes()
    failed = 0
    for at in range(20):
        files: Any = FailingFiles(at)
        try:
            export(path, {"a": torch.ones(3)}, {}, files)
        except OSError:
            failed += 1
            after = path.read_bytes()
            assert after == before or b"\x80\x3f" in after, "either the old or the new, whole"
        else:
            break
    assert failed >= 5
    assert path.read_bytes() != before
