"""Between two saves anything may change: names, shapes, types, order, identity. What is saved is always the state."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from torch import nn

from spotheal.training import checkpoint, state
from spotheal.training.checkpoint import Loaded, Outcome, Store
from spotheal.training.slotfile import packing
from spotheal.training.slotfile.copying import Copy, Plan
from spotheal.training.slotfile.image import Image
from spotheal.training.slotfile.skeleton import Skeleton

NAMES = some.sampled_from(["a", "b", "a/b", "$c", "0", ""])
DTYPES = some.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16])


@some.composite
def tensors(draw: Any) -> Any:
    shape = draw(some.lists(some.integers(0, 3), max_size=2))
    tensor = torch.full(shape, draw(some.integers(0, 1)), dtype=draw(DTYPES))
    if draw(some.booleans()) and tensor.dim() == 2:
        tensor = tensor.t()
    if draw(some.booleans()) and tensor.is_floating_point():
        return nn.Parameter(tensor)
    return tensor


LEAVES = (
    some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False) | some.text(max_size=3)
    | some.binary(max_size=3) | tensors()
)  # fmt: skip
KEYS = NAMES | some.integers(0, 2) | some.booleans() | some.tuples(some.integers(0, 1))
TREES = some.recursive(
    LEAVES | some.sets(some.integers(0, 3), max_size=2),
    lambda inner: (
        some.lists(inner, max_size=3)
        | some.tuples(inner, inner)
        | some.dictionaries(NAMES, inner, max_size=3)
        | some.dictionaries(KEYS, inner, max_size=3)
        | some.dictionaries(NAMES, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=8,
)


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(alike, one, other))
    return type(one) is type(other) and bool(one == other)


@settings(max_examples=120, deadline=None)
@given(TREES, TREES)
def test_a_tree_that_fits_the_skeleton_is_taken_apart_as_pack_does_it(one: Any, other: Any) -> None:
    skeleton = Skeleton(one)
    for tree in (one, other):
        packed, values = packing.pack(tree)
        leaves = skeleton.leaves(tree) if skeleton.exact else None
        if leaves is None:
            assert tree is other or not skeleton.exact
            continue
        named = dict(zip(skeleton.names, skeleton.sources(leaves), strict=True))
        assert list(named) == list(packed)
        assert all(alike(named[name].detach(), packed[name]) for name in packed)
        assert skeleton.text(skeleton.plain(leaves)) == packing.to_json(values)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trees=some.lists(TREES, min_size=2, max_size=5), data=some.data())
def test_whatever_follows_whatever_each_save_holds_its_own_state(trees: list[Any], data: Any, tmp_path: Path) -> None:
    store = Store(tmp_path / str(len(list(tmp_path.iterdir()))), chunk_bytes=4096)
    order = data.draw(some.lists(some.sampled_from(range(len(trees))), min_size=2, max_size=6))
    for step, index in enumerate(order):
        store.save_now(step, trees[index])
        loaded = store.load()
        assert loaded is not None
        assert loaded.step == step
        assert alike(_as_loaded(trees[index]), loaded.tree)
    store.close()


def _as_loaded(tree: Any) -> Any:
    """Parameters come back as tensors, every mapping as a dict."""
    if isinstance(tree, torch.Tensor):
        return tree.detach()
    if isinstance(tree, dict):
        return {key: _as_loaded(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_as_loaded(value) for value in tree)
    return tree


def test_a_training_that_grows_and_changes_its_tensors_is_saved_as_it_is(tmp_path: Path) -> None:
    """Optimizer state appears with the first step, an average later; parameters are added, replaced, retyped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
    store = Store(tmp_path)

    def step() -> None:
        model(torch.randn(8, 4, dtype=model[0].weight.dtype)).sum().backward()
        optimizer.step()

    def average() -> None:
        parts["average"] = torch.optim.swa_utils.AveragedModel(model)

    def grow() -> None:
        model.append(nn.Linear(4, 2))
        optimizer.add_param_group({"params": model[2].parameters()})

    def same_place_other_shape() -> None:
        model[0].bias.data = model[0].bias.data.view(2, 2)

    def back() -> None:
        model[0].bias.data = model[0].bias.data.view(4)

    def transposed_in_place() -> None:
        model[0].weight.data = model[0].weight.data.t()

    def other_type() -> None:
        model.double()
        optimizer.state.clear()

    def frozen() -> None:
        model[1].running_mean = None

    def replaced() -> None:
        model[0] = nn.Linear(4, 4, dtype=torch.float64)

    changes = (step, step, average, step, grow, step, same_place_other_shape, back, transposed_in_place, other_type,
               frozen, replaced, lambda: None)  # fmt: skip
    for number, change in enumerate(changes):
        change()
        expected = {name: part.state_dict() for name, part in parts.items()}
        expected = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, expected)
        later = state.changed_by_step(optimizer)
        store.save(number, {name: state.part_state(part) for name, part in parts.items()}, later=later)
        store.wait_copied()
        store.flush()
        loaded = store.load()
        assert loaded is not None
        assert loaded.step == number
        assert alike(_as_loaded(expected), loaded.tree), change


def test_two_places_never_share_a_name(tmp_path: Path) -> None:
    tree = {"a/b": torch.zeros(2), "a": {"b": torch.ones(2)}, "c": {0: torch.zeros(1), "0": torch.ones(1)}}
    store = Store(tmp_path)
    store.save_now(1, tree)
    loaded = store.load()
    assert loaded is not None
    assert alike(tree, loaded.tree)


# --------------------------------------------------------------------------------------------- a module's state, faster
class OwnState(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"seen": 3}

    def set_extra_state(self, extra: Any) -> None:
        pass


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))

    def without_bias(module: nn.Module, own: dict[str, Any], prefix: str, _: Any) -> None:
        del own[prefix + "bias"]

    module[0].register_state_dict_post_hook(without_bias)
    return module


def shared() -> nn.Module:
    inner = nn.Linear(2, 2)
    return nn.Sequential(inner, nn.ReLU(), inner)


def not_persistent() -> nn.Module:
    module = nn.BatchNorm1d(3)
    module.register_buffer("scratch", torch.ones(2), persistent=False)
    module.register_buffer("nothing", None)
    return module


def patched() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    setattr(module[0], "state_dict", lambda *_, **__: {"other": torch.ones(1)})  # noqa: B010
    return module


MODULES = {
    "plain": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2, bias=False)),
    "own state": lambda: nn.Sequential(OwnState(2, 2)),
    "hook": hooked,
    "shared": shared,
    "not persistent": not_persistent,
    "patched": patched,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    "lists": lambda: nn.ModuleDict({"a": nn.ModuleList([nn.Linear(1, 1)]), "b": nn.ParameterList([torch.ones(2)])}),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2),
    "average": lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2)),
}


@pytest.mark.parametrize("name", MODULES)
def test_the_state_of_a_module_is_what_state_dict_says(name: str) -> None:
    module = MODULES[name]()
    expected, found = module.state_dict(), state.part_state(module)
    assert list(found) == list(expected)
    assert alike(_as_loaded(dict(expected)), _as_loaded(dict(found)))


class OwnOptimizer(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "own": 1}


def with_hook(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.register_state_dict_post_hook(lambda _, state_dict: {**state_dict, "hooked": True})
    return optimizer


def in_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.named_parameters()
    optimizer = torch.optim.AdamW([{"params": others, "lr": 1e-3}, {"params": [first], "betas": (0.8, 0.9)}])
    optimizer.state["not a parameter"] = {"x": torch.ones(2)}  # type: ignore[index]
    return optimizer


def assigned(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters())
    setattr(optimizer, "state_dict", lambda: {"other": 1})  # noqa: B010
    return optimizer


OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters()),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), momentum=0.9),
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters()),
    "groups": in_groups,
    "hook": with_hook,
    "own": lambda model: OwnOptimizer(model.parameters()),
    "assigned": assigned,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer_is_what_state_dict_says(name: str) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    optimizer = OPTIMIZERS[name](model)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step(lambda: model(torch.ones(1, 2)).sum())
        assert alike(optimizer.state_dict(), state.part_state(optimizer))


# -------------------------------------------------------------------- what is copied later is looked at later as well
class Held:
    """The writer's look at the tensors waits for `release`: the training has gone on when it comes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release = threading.Event()
        real = Copy.settle

        def settle(copy: Copy) -> None:
            assert self.release.wait(20)
            real(copy)

        monkeypatch.setattr(Copy, "settle", settle)


def saved_then(
    store: Store, changed: Any, monkeypatch: pytest.MonkeyPatch, before: torch.Tensor
) -> tuple[Outcome, Loaded]:
    """Save twice, `changed(weight)` between; the outcome of the second, and what is loaded after it."""
    weight, buffer = torch.arange(6.0).view(2, 3), before
    tree = {"weight": weight, "buffer": buffer, "lr": 0.5}
    assert store.save(1, tree, later=[weight])
    store.flush()
    with monkeypatch.context() as patch:
        held = Held(patch)
        changed(weight)
        assert store.save(2, tree, later=[weight])
        buffer.fill_(99.0)  # as the next forward pass does
        held.release.set()
        store.wait_copied()
        outcome = store.flush()
    loaded = store.load()
    assert outcome is not None and loaded is not None
    return outcome, loaded


@pytest.mark.parametrize("shape", [(3, 2), (6,), (2, 2), (700, 300)])
def test_a_tensor_that_changed_in_its_place_is_saved_as_it_is_beside_what_was_copied_before(
    shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = torch.rand(shape)
    store = Store(tmp_path, chunk_bytes=1 << 16)

    def changed(weight: torch.Tensor) -> None:
        weight.data = new.clone()

    outcome, loaded = saved_then(store, changed, monkeypatch, torch.ones(5))
    assert outcome.fault is None and outcome.data_bytes >= new.numel() * 4
    assert alike({"weight": new, "buffer": torch.ones(5), "lr": 0.5}, loaded.tree)
    store.close()


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_what_is_copied_at_once_may_change_its_type_and_shape_too(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = torch.ones(5)
    store = Store(tmp_path)

    def changed(weight: torch.Tensor) -> None:
        buffer.data = torch.full((2, 2), 7, dtype=dtype)
        weight.data = torch.zeros(4)

    _, loaded = saved_then(store, changed, monkeypatch, buffer)
    assert loaded.step == 2
    assert alike({"weight": torch.zeros(4), "buffer": torch.full((2, 2), 7, dtype=dtype), "lr": 0.5}, loaded.tree)
    store.close()


def test_a_tensor_that_can_be_saved_no_more_fails_that_save_by_name_and_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)

    def changed(weight: torch.Tensor) -> None:
        weight.data = torch.ones(3, dtype=torch.complex128)

    outcome, loaded = saved_then(store, changed, monkeypatch, torch.ones(5))
    assert outcome.fault is not None and "weight" in outcome.fault.message and "complex128" in outcome.fault.message
    assert loaded.step == 1  # the one before is as it was
    assert store.save_now(3, {"weight": torch.ones(3), "buffer": torch.ones(5), "lr": 0.5}).path is not None
    store.close()


def test_no_memory_for_a_tensor_that_has_grown_fails_that_save_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, real = Store(tmp_path), checkpoint.Image

    def changed(weight: torch.Tensor) -> None:
        weight.data = torch.ones(100_000)
        monkeypatch.setattr(checkpoint, "Image", no_memory)

    def no_memory(size: int, touched: bool = True) -> Image:
        if touched:
            raise MemoryError
        return real(size, touched)

    outcome, loaded = saved_then(store, changed, monkeypatch, torch.ones(5))
    assert outcome.fault is not None and "memory" in outcome.fault.message
    assert loaded.step == 1
    monkeypatch.setattr(checkpoint, "Image", real)
    assert store.save_now(3, {"weight": torch.ones(100_000), "buffer": torch.ones(5), "lr": 0.5}).path is not None
    store.close()


def test_weights_swapped_by_other_memory_are_never_saved_for_those_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Averaged weights are put in for an evaluation: before the writer has looked the save fails, after it it holds."""
    weight = torch.ones(200_000)
    store = Store(tmp_path, chunk_bytes=1 << 16)
    assert store.save(1, {"weight": weight}, later=[weight])
    store.flush()
    with monkeypatch.context() as patch:
        held = Held(patch)
        assert store.save(2, {"weight": weight}, later=[weight])
        weight.data = torch.full((200_000,), 7.0)
        held.release.set()
        store.wait_copied()
        outcome = store.flush()
    assert outcome is not None and outcome.fault is not None and "other memory" in outcome.fault.message
    with monkeypatch.context() as patch:
        settled, real = threading.Event(), Copy.run

        def run(copy: Copy, threads: Any = None) -> None:
            assert settled.wait(20)
            real(copy, threads)

        patch.setattr(Copy, "run", run)
        assert store.save(3, {"weight": weight}, later=[weight])
        while store._copy is not None and store._copy._from is None:
            time.sleep(0.001)
        weight.data = torch.zeros(1)  # what it had is freed, but for the store
        settled.set()
        store.wait_copied()
        store.flush()
    loaded = store.load()
    assert loaded is not None and loaded.step == 3 and bool((loaded.tree["weight"] == 7).all())
    store.close()


def test_what_only_begins_where_a_later_tensor_begins_is_copied_at_once(tmp_path: Path) -> None:
    flat = torch.arange(20.0)
    weight = nn.Parameter(flat[:10])
    store = Store(tmp_path)
    for step in (1, 2):
        assert store.save(step, {"flat": flat, "weight": weight.detach()}, later=[weight])
        expected = flat.clone()
        flat[10:] = -float(step)
        store.wait_copied()
        store.flush()
        loaded = store.load()
        assert loaded is not None and torch.equal(loaded.tree["flat"], expected)
    store.close()


@pytest.mark.parametrize("content", [torch.ones(5), torch.empty(0)])
def test_what_was_copied_at_once_may_be_emptied_or_grow_before_the_writer_looks(
    content: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, cache = torch.arange(6.0), content.clone()
    tree = {"weight": weight, "cache": cache}
    store = Store(tmp_path)
    store.save(1, tree, later=[weight])
    store.flush()
    with monkeypatch.context() as patch:
        held = Held(patch)
        weight.data = torch.zeros(2, 2)
        assert store.save(2, tree, later=[weight])
        cache.resize_(0 if len(content) else 5)
        held.release.set()
        store.flush()
    loaded = store.load()
    assert loaded is not None and loaded.step == 2
    assert alike({"weight": torch.zeros(2, 2), "cache": content}, loaded.tree)
    store.close()


def test_parameters_that_a_forward_pass_changes_are_copied_at_once() -> None:
    bounded = nn.Sequential(nn.Embedding(4, 2, max_norm=1.0), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(bounded.parameters())
    optimizer.state["global step"] = 5  # type: ignore[index, assignment]
    later = state.changed_by_step(optimizer, state.changed_in_forward({"model": bounded, "step": 3}))
    assert list(map(id, later)) == list(map(id, bounded[1].parameters()))


def test_a_traced_module_is_saved_by_its_own_state_dict() -> None:
    traced = torch.jit.trace(nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2))  # type: ignore[no-untyped-call]
    assert list(state.part_state(traced)) == list(traced.state_dict())


def test_parameters_that_state_dict_has_detached_are_copied_later_as_well(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    later = list(model.parameters())
    sources = [one.detach() for one in later] + list(model.buffers())
    names = [str(number) for number in range(len(sources))]
    plan = Plan(names, sources, 4096)
    copy = Copy(plan, Image(plan.layout.data_bytes), sources, later)
    assert not copy.copied.is_set()
    assert sorted(number for number, _ in copy._parts.later) == list(range(len(later)))
