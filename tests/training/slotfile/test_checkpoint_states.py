"""States that user code may hand to the store, and how they come back or are refused."""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

from spotheal.training.checkpoint import SaveFailed, Store
from spotheal.training.slotfile import packing
from spotheal.training.slotfile.format import JSON_NESTING_MAX, NESTING_MAX
from spotheal.training.slotfile.packing import UnsavableState
from spotheal.training.slotfile.skeleton import Skeleton


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


def test_a_generators_state_among_other_tensors_can_be_given_to_a_generator(tmp_path: Path) -> None:
    """torch reads it from the start of the storage; StatefulDataLoader(shuffle=True) failed at every resume."""
    store, generator = Store(tmp_path), torch.Generator().manual_seed(3)
    flag = torch.ones(1, dtype=torch.uint8)
    store.save_now(1, {"numbers": torch.arange(9.0), "flag": flag, "g": generator.get_state()})
    expected = torch.rand(4, generator=generator)
    loaded = store.load()
    store.close()
    assert loaded is not None
    assert loaded.tree["g"].storage_offset() == 0
    other = torch.Generator()
    other.set_state(loaded.tree["g"])
    assert torch.equal(torch.rand(4, generator=other), expected)


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


def nested() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that they are a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


ODD = {
    "longdouble": (lambda: numpy.longdouble(1.5), "longdouble", "float64"),
    "clongdouble": (lambda: numpy.clongdouble(1.5), "clongdouble", "float64"),
    "longdouble array": (lambda: numpy.array(1.5, dtype=numpy.longdouble), "ndarray of", "float64"),
    "time": (lambda: numpy.datetime64(5, "ns"), "datetime64", "float64"),
    "no time": (lambda: numpy.timedelta64("NaT", "ns"), "timedelta64", "float64"),
    "times": (lambda: numpy.zeros(2, dtype="datetime64[ns]"), "datetime64", "float64"),
    "complex array": (lambda: numpy.ones(2, dtype=numpy.complex128), "complex128", "real"),
    "nested": (nested, "nested tensor", "unbind"),
    "lazy": (lambda: torch.nn.LazyLinear(3).weight, "lazy module", "call the model once"),
    "lazy buffer": (lambda: torch.nn.LazyBatchNorm1d().running_mean, "lazy module", "call the model once"),
    "meta": (lambda: torch.ones(3, device="meta"), "meta device, which has no content", "to_empty"),
    "empty meta": (lambda: torch.ones(0, device="meta"), "meta device, which has no content", "to_empty"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse", "values()"),
    "dimensions": (lambda: torch.ones([1] * 65), "65 dimensions", "64"),
}


@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
@pytest.mark.parametrize("name", ODD)
def test_an_odd_value_is_refused_with_its_place_and_what_to_do(name: str, later: bool, tmp_path: Path) -> None:
    make, what, next_step = ODD[name]
    store, value = Store(tmp_path), make()
    for call in (store.save, lambda _, tree, **__: store.prepare(tree)):
        with pytest.raises(UnsavableState) as refused:
            call(2, {"a": {"b": value}}, later=[value] if later and isinstance(value, torch.Tensor) else ())
        assert refused.value.message.startswith("a/b is a ") and what in refused.value.message
        assert next_step in refused.value.next_step
    assert store.save_now(3, {"x": torch.ones(1)}).path is not None
    store.close()


@pytest.mark.parametrize("name", ["__metadata__", "spotheal.padding"])
@pytest.mark.parametrize("make", [torch.ones, numpy.ones], ids=["tensor", "array"])
def test_a_name_of_the_formats_own_is_refused_for_a_tensor_alone(name: str, make: Any, tmp_path: Path) -> None:
    store = Store(tmp_path)
    for later in ((), [torch.ones(2)]):
        with pytest.raises(UnsavableState, match=name) as refused:
            store.save(1, {name: make(3)}, later=later)
        assert "another key" in refused.value.next_step
    store.save_now(2, {name: 1, "a": {name: make(3)}})
    loaded = store.load()
    assert loaded is not None and loaded.tree[name] == 1 and len(loaded.tree["a"][name]) == 3
    store.close()


@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
@pytest.mark.parametrize("name", ["nested", "meta", "sparse", "dimensions"])
def test_one_that_becomes_odd_between_two_saves_fails_that_save_by_name(name: str, later: bool, tmp_path: Path) -> None:
    """The structure is the same then, and no value is looked at one by one."""
    store = Store(tmp_path)
    make, what, _ = ODD[name]
    usual, odd = {"a": {"b": torch.ones(3)}}, {"a": {"b": make()}}
    store.save_now(1, usual)
    fault: Any = None
    try:
        store.save_now(2, odd, later=[odd["a"]["b"]] if later else ())
    except (UnsavableState, SaveFailed) as refused:
        fault = refused
    assert fault is not None and "a/b" in fault.message and what in fault.message
    with pytest.raises(UnsavableState, match="a/b"):
        store.prepare(odd)
    assert store.save_now(3, usual).path is not None
    store.close()


def test_what_is_later_and_not_of_the_state_may_be_of_any_kind(tmp_path: Path) -> None:
    store = Store(tmp_path)
    later = [ODD[name][0]() for name in ("nested", "lazy", "meta", "empty meta", "sparse")]
    assert store.save_now(1, {"x": torch.ones(3)}, later=later).path is not None
    store.close()


# ------------------------------------------------------------------------------------------------------------- nesting
IN_ONE_MORE = {
    "list": lambda inner: [inner],
    "tuple": lambda inner: (inner,),
    "dict": lambda inner: {"a": inner},
    "ordered": lambda inner: OrderedDict(a=inner),
    "dict of a number": lambda inner: {1: inner},
    "in turns": lambda inner: {1: [({"a": inner},)]},
}
FROZEN = {
    "frozen set": lambda inner: frozenset((inner,)),
    "key": lambda inner: (inner,),
}


def nest(kind: str, levels: int, inner: Any) -> Any:
    """`levels` containers in all."""
    in_one_more = (IN_ONE_MORE | FROZEN)[kind]
    for _ in range(levels // 4 if kind == "in turns" else levels - (kind == "key")):
        inner = in_one_more(inner)
    return {inner: 1} if kind == "key" else inner


def deeper(frames: int, call: Any) -> Any:
    return call() if frames == 0 else deeper(frames - 1, call)


@pytest.mark.parametrize("kind", [*IN_ONE_MORE, *FROZEN])
def test_the_deepest_state_that_is_taken_is_loaded_deep_in_the_stack(kind: str, tmp_path: Path) -> None:
    """It was once saved, and set aside as broken by a load that began deeper than the save."""
    store = Store(tmp_path)
    tree = nest(kind, NESTING_MAX, 1 if kind in FROZEN else torch.ones(2))
    for step in (1, 2):
        deeper(500, lambda step=step: store.save_now(step, tree, info=nest("list", NESTING_MAX, 1)))
    loaded = deeper(500, store.load)
    assert loaded is not None and store.set_aside == []
    again, _ = packing.pack(loaded.tree)
    assert packing.pack(loaded.tree)[1] == packing.pack(tree)[1] and len(again) == (kind not in FROZEN)
    store.close()


@pytest.mark.parametrize("kind", [*IN_ONE_MORE, *FROZEN])
@pytest.mark.parametrize("levels", [NESTING_MAX + 4, 460])
def test_a_deeper_one_is_refused_with_its_place(kind: str, levels: int, tmp_path: Path) -> None:
    store = Store(tmp_path)
    tree = {"model": {"deep": nest(kind, levels, 1)}}
    for take in (lambda: store.save(1, tree), lambda: packing.pack(tree), lambda: Skeleton(tree)):
        with pytest.raises(UnsavableState, match=f"model/deep.* {NESTING_MAX} containers") as refused:
            take()
        assert len(refused.value.message) < 250 and refused.value.next_step
    assert list(tmp_path.iterdir()) == []
    store.close()


def test_one_that_has_grown_deeper_since_the_last_save_is_refused_too(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save_now(1, {"x": [1]})
    with pytest.raises(UnsavableState, match="x/0"):
        store.save(2, {"x": [nest("list", NESTING_MAX, 1)]})
    store.close()


def test_an_info_that_a_load_might_not_read_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save_now(1, {}, info=nest("list", JSON_NESTING_MAX, 1))
    assert store.newest_info() == nest("list", JSON_NESTING_MAX, 1)
    for levels in (JSON_NESTING_MAX + 1, 500, 5000):
        for kind in ("list", "dict"):
            with pytest.raises(UnsavableState):
                store.save(2, {}, info={"seen": nest(kind, levels, 1)})
    with pytest.raises(UnsavableState, match="seen/0/0"):
        store.save(2, {}, info={"flat": "[[", "seen": nest("list", JSON_NESTING_MAX, 1)})
    assert not store.busy
    store.close()


def test_a_save_at_the_end_of_the_stack_is_refused_and_loses_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    tree, said = {"x": nest("dict", NESTING_MAX - 1, 1)}, []
    room = sys.getrecursionlimit() - len(inspect.stack(0))
    for left in range(60, 400, 7):
        try:
            deeper(room - left, lambda: (Skeleton(tree), packing.to_json(tree)))
        except UnsavableState as refused:
            said.append(refused.message)
    assert said and all("interpreter's stack" in one for one in said)
    assert store.save_now(2, tree).path is not None
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
