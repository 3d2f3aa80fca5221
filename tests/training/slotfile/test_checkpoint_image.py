"""The image that checkpoints are staged in, beside processes that are forked meanwhile (DataLoader's workers)."""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from spotheal.training.checkpoint import Store
from spotheal.training.slotfile.image import Image

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what a fork gets is Linux's")


def _tell(tensor: torch.Tensor, to: Connection) -> None:
    to.send(tensor[:4].tolist())


def in_a_fork(tensor: torch.Tensor) -> Any:
    """The first values that a forked process finds in `tensor`."""
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_tell, args=(tensor, there))
    child.start()
    try:
        assert here.poll(30)
        return here.recv()
    finally:
        child.join()


def test_an_image_costs_a_forked_process_and_its_parent_nothing() -> None:
    image = Image(1 << 20)
    image.bytes.fill_(7)
    assert in_a_fork(image.bytes) == [0, 0, 0, 0]
    assert image.bytes[:4].tolist() == [7, 7, 7, 7]


def test_a_loaded_state_is_there_in_a_forked_process(tmp_path: Path) -> None:
    saved = torch.arange(4096, dtype=torch.float32) + 1
    store = Store(tmp_path)
    store.save_now(3, {"weights": saved})
    loaded = store.load()
    store.close()
    assert loaded is not None
    assert in_a_fork(loaded.tree["weights"]) == [1.0, 2.0, 3.0, 4.0]


def test_what_a_forked_process_writes_into_a_loaded_state_is_its_own(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save_now(3, {"weights": torch.ones(4096)})
    loaded = store.load()
    store.close()
    assert loaded is not None
    weights = loaded.tree["weights"]
    child = multiprocessing.get_context("fork").Process(target=weights.zero_)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert weights[:4].tolist() == [1.0, 1.0, 1.0, 1.0]
