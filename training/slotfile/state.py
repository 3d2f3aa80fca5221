"""Everything that makes a resume exact, as a tree of plain values and tensors, and that tree as JSON and named tensors.

Only these may occur in a state: None, bool, int, float, str, bytes, list, tuple, set, dict, torch.Tensor, numpy arrays
and numbers. Anything else is refused at the save, with its place in the tree; nothing is ever pickled.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import math
import random
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import torch

from spotheal.agent.protocol.errors import SpothealError
from spotheal.training.slotfile.format import (
    DIMENSIONS_MAX,
    JSON_NESTING_MAX,
    NESTING_MAX,
    RESERVED_NAMES,
    nested_beyond,
)
from spotheal.training.slotfile.image import FORMAT_DTYPE


class Stateful(Protocol):
    """What torch's modules, optimizers, schedulers, scalers and our sampler have in common."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class UnsavableState(SpothealError, TypeError):
    """A value of the state has a type that cannot be saved without executing code at the load."""


# ---------------------------------------------------------------------------------------------------- tree <-> values
def pack(tree: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """The tensors of `tree` by name, and the rest as values for JSON. UnsavableState names what cannot be saved."""
    tensors: dict[str, torch.Tensor] = {}
    try:
        return tensors, _pack(tree, "", tensors, 0)
    except RecursionError:
        raise no_stack() from None


def unpack(values: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The tree again. ValueError, KeyError, TypeError or RecursionError where `values` was not made by `pack`."""
    return _unpack(values, {name: _at_its_own_start(tensor) for name, tensor in tensors.items()}, {}, 0)


_GENERATOR_BYTES_MAX = 8192  # torch's on the CPU takes 5056


def _at_its_own_start(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of what may be the state of a torch.Generator, which a part keeps; anything else as it is.

    `Generator.set_state` reads from the start of the storage, whatever the tensor's offset (torch 2.13): there lie
    other tensors of the file, and it ends with "Invalid mt19937 state" or a segmentation fault.
    """
    may_be = tensor.dtype is torch.uint8 and tensor.dim() == 1 and tensor.numel() <= _GENERATOR_BYTES_MAX
    return tensor.clone() if may_be and tensor.storage_offset() else tensor


def _unpack(values: Any, tensors: Mapping[str, torch.Tensor], arrays: dict[str, Any], depth: int) -> Any:
    if not isinstance(values, (list, dict)):
        return values
    key, items = next(iter(values.items())) if isinstance(values, dict) and len(values) == 1 else ("", None)
    if key in _LEAF_MARKS:
        return _leaf(key, items, tensors, arrays)
    if depth == NESTING_MAX:
        raise ValueError(f"it is nested in more than {NESTING_MAX} levels")
    depth += 1
    if isinstance(values, list):
        return [_unpack(value, tensors, arrays, depth) for value in values]
    if key[:1] != "$":
        return {key: _unpack(value, tensors, arrays, depth) for key, value in values.items()}
    if not isinstance(items, list):
        raise ValueError(f"{key[:80]!r} holds {type(items).__name__}")
    if key == "$tuple":
        return tuple([_unpack(item, tensors, arrays, depth) for item in items])
    if key == "$set":
        return {_unpack(item, tensors, arrays, depth) for item in items}
    if key == "$frozenset":  # a set could be no item of a set, and no key
        return frozenset([_unpack(item, tensors, arrays, depth) for item in items])
    if key == "$dict":
        return {_unpack(name, tensors, arrays, depth): _unpack(item, tensors, arrays, depth) for name, item in items}
    raise ValueError(f"{key[:80]!r} is no mark of ours")


_LEAF_MARKS = frozenset(("$tensor", "$array", "$float", "$bytes"))


def _leaf(mark: str, value: Any, tensors: Mapping[str, torch.Tensor], arrays: dict[str, Any]) -> Any:
    if not isinstance(value, str):  # float() of a number of 400 digits is an OverflowError
        raise ValueError(f"{mark!r} holds {type(value).__name__}")
    if mark == "$float":
        return float(value)
    if mark == "$bytes":
        return base64.b64decode(value)
    if value not in tensors:
        raise ValueError(f"there is no tensor {value[:80]!r}")
    if mark == "$tensor":
        return tensors[value]
    if value not in arrays:  # one copy however often it is named: what a load takes is bounded by the file
        try:
            arrays[value] = tensors[value].numpy().copy()
        except RuntimeError as fault:
            raise ValueError(f"tensor {value[:80]!r} is no array: {fault}") from fault
    return arrays[value]


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def to_json(values: Any) -> str:
    """Without spaces; ValueError for what is not finite, TypeError for what is no JSON, UnsavableState for what is
    nested so deeply that a load might not read it."""
    try:
        text = _ENCODER.encode(values)
    except RecursionError:
        raise no_stack() from None
    # Fewer brackets cannot lie deeper; and what holds itself has not come so far.
    if text.count("[") + text.count("{") > JSON_NESTING_MAX and nested_beyond(values, JSON_NESTING_MAX):
        raise _too_deep(_place_beyond(values, JSON_NESTING_MAX), JSON_NESTING_MAX)
    return text


def _place_beyond(values: Any, levels: int) -> str:
    """Where something lies in more than `levels` levels, as the first of them on each."""
    inside = [("", values)]
    for _ in range(levels):
        inside = [
            (f"{place}/{key}", item)
            for place, one in inside
            for key, item in (one.items() if isinstance(one, dict) else enumerate(one))
            if isinstance(item, (dict, list, tuple))
        ]
    return inside[0][0][1:]


def _too_deep(place: str, levels: int) -> UnsavableState:
    return UnsavableState(
        f"{_said(place)} lies in more than {levels} containers, one in the other, or the state holds itself",
        next_step="give it in a flatter form: a list of the parts, or a dict by their paths",
    )


def no_stack() -> UnsavableState:
    """For a RecursionError of a state that is not too deep by itself, as far as is known."""
    return UnsavableState(
        "the state cannot be taken apart so deep in the interpreter's stack",
        next_step="save from a function that is called less deeply, or raise `sys.setrecursionlimit`",
    )


def _said(place: str) -> str:
    """`place` for a message: one of a deep tree is long, and its beginning says where to look."""
    return "the state" if not place else place if len(place) <= 80 else f"{place[:60]}…{place[-15:]}"


_STRIDED = torch.strided


def _pack(value: Any, place: str, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        refuse_unsavable(value, place)
        place = _unused(place, tensors)
        tensors[place] = value.detach() if value.requires_grad else value
        return {"$tensor": place}
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, (list, tuple, set, frozenset, Mapping)):
        if depth == NESTING_MAX:
            raise _too_deep(place, NESTING_MAX)
        depth += 1
    if isinstance(value, list):
        return [_pack(item, f"{place}/{index}", tensors, depth) for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [_pack(item, f"{place}/{index}", tensors, depth) for index, item in enumerate(value)]}
    if isinstance(value, (set, frozenset)):
        mark = "$frozenset" if isinstance(value, frozenset) else "$set"
        return {mark: [_pack(item, place, tensors, depth) for item in sorted(value, key=repr)]}
    if isinstance(value, Mapping):
        if all(type(key) is str and key[:1] != "$" for key in value):
            begin = f"{place}/" if place else ""
            return {key: _pack(item, begin + key, tensors, depth) for key, item in value.items()}
        return {
            "$dict": [
                [_pack(key, place, tensors, depth), _pack(item, f"{place}/{key}", tensors, depth)]
                for key, item in value.items()
            ]
        }
    if type(value).__module__ == "numpy":
        try:
            if getattr(value, "dtype", None) is not None and value.dtype.kind in "mM":
                raise TypeError("times in nanoseconds have a plain number as their item, NaT has None")
            plain = torch.from_numpy(value.copy()) if getattr(value, "shape", ()) else value.item()
        except (TypeError, ValueError, AttributeError):  # objects, texts, foreign byte order; numpy's other classes
            plain = value
        if type(plain).__module__ == "numpy":  # and a longdouble's item is itself
            raise UnsavableState(
                f"{_said(place)} is a numpy {_kind(value)}: not savable",
                next_step="give it as numbers that torch has too (`.astype('float64')`), texts as a list of str",
            )
        if isinstance(plain, torch.Tensor):
            refuse_unsavable(plain, place)
            place = _unused(place, tensors)
            tensors[place] = plain
            return {"$array": place}
        return _pack(plain, place, tensors, depth)
    raise UnsavableState(
        f"{_said(place)} is a {type(value).__name__}, which cannot be saved without executing code at the load",
        next_step="give its numbers as int, float, str, list, dict or tensor in state_dict()",
    )


def refuse_unsavable(tensor: torch.Tensor, place: str) -> None:
    """UnsavableState for one that has no content, or that no safetensors file holds: not so, or not under this name."""
    what = next_step = ""
    if torch.nn.parameter.is_lazy(tensor):  # first: it has neither a size nor a number of dimensions
        what = "a parameter of a lazy module that has not seen an input, so it has no shape yet"
        next_step = "call the model once before the first save"
    elif tensor.is_nested:
        what, next_step = "a nested tensor", "save its parts, `tensor.unbind()`, as a list"
    elif tensor.dtype not in FORMAT_DTYPE or tensor.layout is not _STRIDED:
        what = f"a tensor of {tensor.dtype}, {tensor.layout}: not savable"
        next_step = "save a dense tensor of another type, or its parts: `indices()` and `values()`, `real` and `imag`"
    elif tensor.is_meta:
        what = "a tensor on the meta device, which has no content"
        next_step = "give the model memory (`to_empty`) and its values before it is saved"
    elif tensor.dim() > DIMENSIONS_MAX:
        what = f"a tensor of {tensor.dim()} dimensions: not savable"
        next_step = f"reshape it to at most {DIMENSIONS_MAX}"
    elif place in RESERVED_NAMES:
        what, next_step = "a name of the file format's own: no tensor can have it", "give that tensor another key"
    if what:
        raise UnsavableState(f"{_said(place)} is {what}", next_step=next_step)


def _kind(value: Any) -> str:
    return f"{type(value).__name__} of {value.dtype}" if hasattr(value, "dtype") else type(value).__name__


def _unused(place: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """`a/b` of {"a": {"b": ...}} and of {"a/b": ...} must not be one name."""
    while place in tensors:
        place += "'"
    return place


# ----------------------------------------------------------------------------------------------------------- the RNGs
def rng_state() -> dict[str, Any]:
    """The state of every generator a training draws from: python, numpy (where it is imported), torch, CUDA."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {
            "version": version,
            "numbers": torch.frombuffer(array("q", numbers), dtype=torch.int64),
            "gauss": gauss,
        },
        "torch": torch.get_rng_state(),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        legacy = numpy.random.get_state(legacy=False)
        state["numpy"] = {
            "kind": legacy["bit_generator"],
            "key": torch.from_numpy(legacy["state"]["key"].astype("int64")),
            "position": int(legacy["state"]["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "gauss": float(legacy["gauss"]),
        }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = {str(device): value for device, value in enumerate(torch.cuda.get_rng_state_all())}
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put every generator back to where it was. Generators of CUDA devices that are gone are left out."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
    torch.set_rng_state(state["torch"].clone())
    if "numpy" in state:
        import numpy

        saved = state["numpy"]
        key = saved["key"].numpy().astype("uint32")
        numpy.random.set_state((saved["kind"], key, saved["position"], saved["has_gauss"], saved["gauss"]))
    if "cuda" in state and torch.cuda.is_available():
        for device, value in state["cuda"].items():
            if int(device) < torch.cuda.device_count():
                torch.cuda.set_rng_state(value.clone(), int(device))


def digest(state: Mapping[str, Any], next_ids: Iterable[int]) -> str:
    """12 hex digits over the generators and the ids of the next samples: logged at save and resume, to be compared."""
    hashed = hashlib.sha256(",".join(map(str, next_ids)).encode())
    tensors, values = pack(state)
    hashed.update(json.dumps(values, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous().cpu()
        hashed.update(ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size()))
    return hashed.hexdigest()[:12]


# ---------------------------------------------------------------------------------------------------- gather, restore
def gather(parts: Mapping[str, Stateful], others: Sequence[Any] = (), **values: Any) -> dict[str, Any]:
    """The tree to save: each part's state_dict by its name, the RNGs (`others`: of ranks 1, 2, …), and `values`."""
    tree: dict[str, Any] = {"parts": {name: part_state(part) for name, part in parts.items()}, "rng": rng_state()}
    return tree | {"values": values} | ({"others": list(others)} if others else {})


def part_state(part: Stateful) -> dict[str, Any]:
    """`part.state_dict()`; of a module or optimizer whose class and hooks leave that alone the same, 2 times faster.

    A module's are the parameters themselves then, not detached, and change with it: for a save, which takes them apart
    at once.
    """
    if isinstance(part, torch.nn.Module):
        tensors: dict[str, Any] = {}
        if _collect(part, "", tensors):
            return tensors
    if isinstance(part, torch.optim.Optimizer) and type(part).state_dict is torch.optim.Optimizer.state_dict:
        hooks = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
        if "state_dict" not in part.__dict__ and not any(getattr(part, name, None) for name in hooks):
            return _of_optimizer(part)
    return part.state_dict()


def _of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What torch.optim.Optimizer.state_dict gives. Source: torch/optim/optimizer.py, state_dict."""
    numbers: dict[int, int] = {}
    groups, start = [], 0
    for group in optimizer.param_groups:
        ids = list(map(id, group["params"]))
        numbers |= {one: number for number, one in enumerate(ids, start) if one not in numbers}
        start += len(ids)
        packed = {name: value for name, value in group.items() if name != "params"}
        groups.append(packed | {"params": [numbers[one] for one in ids]})
    tensor = torch.Tensor
    own = {numbers[id(key)] if isinstance(key, tensor) else key: value for key, value in optimizer.state.items()}
    return {"state": own, "param_groups": groups}


_PLAIN: dict[type, bool] = {torch.nn.Module: True}  # classes that leave state_dict alone
_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")


def _collect(module: torch.nn.Module, prefix: str, tensors: dict[str, Any]) -> bool:
    """What torch.nn.Module.state_dict gives, in its order; False where the module has a way of its own.

    Most modules have one or none of each, and every look at one costs as much as its memory is away.
    Source: torch/nn/modules/module.py, state_dict and _save_to_state_dict.
    """
    kind = type(module)
    plain = _PLAIN.get(kind)
    if plain is None:
        plain = _PLAIN[kind] = all(getattr(kind, name) is getattr(torch.nn.Module, name) for name in _METHODS)
    own = module.__dict__
    if not plain or "_parameters" not in own or own["_state_dict_hooks"] or own["_state_dict_pre_hooks"]:
        return False  # a traced module has no such dictionaries
    if "state_dict" in own or "_save_to_state_dict" in own or "get_extra_state" in own:
        return False
    if parameters := own["_parameters"]:
        for name, parameter in parameters.items():
            if parameter is not None:
                tensors[prefix + name] = parameter
    if buffers := own["_buffers"]:
        passing = own["_non_persistent_buffers_set"]
        for name, buffer in buffers.items():
            if buffer is not None and name not in passing:
                tensors[prefix + name] = buffer
    if children := own["_modules"]:
        for name, child in children.items():
            if child is not None and not _collect(child, f"{prefix}{name}.", tensors):
                return False
    return True


def restore(parts: Mapping[str, Stateful], tree: Mapping[str, Any], rank: int = 0) -> dict[str, Any]:
    """Load every part, then the RNGs of `rank`, last; returns the plain values.

    A rank that the saved run did not have keeps its generators as they are. SpothealError as `load_parts`.
    """
    load_parts(parts, tree["parts"])
    rngs = [tree["rng"], *tree.get("others", ())]
    if rank < len(rngs):
        set_rng_state(rngs[rank])
    return dict(tree["values"])


def load_parts(parts: Mapping[str, Stateful], saved: Mapping[str, Any]) -> None:
    """Give every part its state. Modules copy what they load; an optimizer on the CPU goes on with the very tensors.

    SpothealError where the saved parts are not the ones asked for, or do not fit them.
    """
    if set(saved) != set(parts):
        raise SpothealError(
            f"the checkpoint holds {', '.join(sorted(saved))}; this run has {', '.join(sorted(parts))}",
            next_step="start with the options of the run that wrote it, or with an empty checkpoint folder",
        )
    for name, part in parts.items():
        try:
            part.load_state_dict(saved[name])
        except (RuntimeError, ValueError, KeyError, TypeError) as fault:
            raise SpothealError(
                f"the checkpoint's {name} does not fit this run's: {str(fault)[:300]}",
                next_step="start with the options of the run that wrote it, or with an empty checkpoint folder",
            ) from fault
        if isinstance(part, torch.optim.Optimizer):
            _refuse_another_optimizer(name, part)


def _refuse_another_optimizer(name: str, optimizer: torch.optim.Optimizer) -> None:
    """torch takes the groups of any optimizer, and fails at the first step: AdamW's have no momentum for SGD."""
    for group in optimizer.param_groups:
        if missing := sorted(set(optimizer.defaults) - set(group)):
            raise SpothealError(
                f"the checkpoint's {name} is not of a {type(optimizer).__name__}: it has no {', '.join(missing)}",
                next_step="start with the options of the run that wrote it, or with an empty checkpoint folder",
            )


def changed_by_step(optimizer: torch.optim.Optimizer, but: Iterable[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """The tensors that nothing but `optimizer.step` changes: the parameters that it trains, and its own state.

    Those of `but` left out: see `changed_in_forward`.
    """
    tensors = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    own = chain.from_iterable(value.values() for value in optimizer.state.values() if isinstance(value, dict))
    if but:
        left_out = set(map(id, but))
        tensors = [tensor for tensor in tensors if id(tensor) not in left_out]
    return tensors + [value for value in own if isinstance(value, torch.Tensor)]


def changed_in_forward(parts: Mapping[str, Any]) -> list[torch.Tensor]:
    """The parameters that a forward pass changes in place: of embeddings with `max_norm`, which bring rows to it.

    Source: torch.nn.Embedding, "will modify weight in-place".
    """
    modules = chain.from_iterable(part.modules() for part in parts.values() if isinstance(part, torch.nn.Module))
    return [
        module.weight
        for module in modules
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.max_norm is not None
    ]
