"""States that user code may hand to the store, and how they come back or are refused."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

from spotheal.training.checkpoint import SaveFailed, Store  # noqa: E402
from spotheal.training.state import UnsavableState  # noqa: E402


def _holds_itself() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    "value",
    [frozenset((1, 2)), {frozenset((1, 2)), 3}, {frozenset((1,)): 2}, {(1, frozenset((2,))): 3}, {(frozenset((1,)),)}],
)
def test_frozen_sets_come_back_as_items_of_sets_and_as_keys(value: Any, tmp_path: Path) -> None:
    with_one = Store(tmp_path)
    with_one.save_now(1, {"x": value})
    loaded = with_one.load()
    with_one.close()
    assert loaded is not None and loaded.tree == {"x": value}
    assert type(loaded.tree["x"]) is type(value)
    assert with_one.set_aside == []


@pytest.mark.parametrize(
    "value",
    [
        numpy.array([object()]),
        numpy.array(["text"]),
        numpy.ones(3, dtype=">f4" if numpy.little_endian else "<f4"),
        numpy.random.default_rng(0),
        _holds_itself(),
    ],
    ids=["objects", "texts", "foreign byte order", "generator", "holds itself"],
)
def test_what_cannot_be_saved_is_refused_by_its_own_error(value: Any, tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(UnsavableState):
        store.save(1, {"x": value})
    assert store.save_now(1, {"x": 1}).path is not None
    store.close()


def test_a_state_that_has_no_text_fails_its_save_and_no_later_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save_now(1, {"x": 1})
    with pytest.raises(SaveFailed, match=r"step 2 .* JSON"):
        store.save_now(2, {"x": 10**5000})
    loaded = store.load()
    assert loaded is not None and loaded.step == 1
    assert store.save_now(3, {"x": 3}).path is not None
    store.close()


@pytest.mark.parametrize("step", [-1, 1.5, "7"])
def test_what_is_no_step_is_refused_for_no_scan_would_find_its_file(step: Any, tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises((ValueError, TypeError)):
        store.save(step, {})
    assert not store.busy and list(tmp_path.iterdir()) == []
    store.close()


def test_threads_that_save_at_once_neither_hang_nor_mix_their_states(tmp_path: Path) -> None:
    store = Store(tmp_path)
    faults: list[Exception] = []

    def saving(first: int) -> None:
        try:
            for step in range(first, first + 20):
                store.save(step, {"w": torch.full((20_000,), float(step))})
                store.wait_copied()
                store.flush()
        except (RuntimeError, ValueError, AttributeError, SaveFailed) as fault:
            faults.append(fault)

    threads = [threading.Thread(target=saving, args=(100 * number,), daemon=True) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert faults == []
    store.close()
    loaded = Store(tmp_path).load()
    assert loaded is not None and bool((loaded.tree["w"] == loaded.step).all())
    assert not list(tmp_path.glob("broken-*"))


def test_two_writers_of_one_folder_never_acknowledge_each_others_file(tmp_path: Path) -> None:
    inside, leave = threading.Event(), threading.Event()

    def in_the_middle() -> None:
        inside.set()
        assert leave.wait(60)

    one, other = Store(tmp_path, before_commit=in_the_middle), Store(tmp_path)
    one.save(1, {"x": 1})
    assert inside.wait(60)
    with pytest.raises(SaveFailed, match="another process"):
        other.save_now(2, {"x": 2})
    leave.set()
    outcome = one.flush()
    assert outcome is not None and outcome.path is not None
    assert other.save_now(3, {"x": 3}).path is not None
    one.close()
    other.close()
