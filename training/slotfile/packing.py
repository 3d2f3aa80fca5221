"""A tree of Python values and tensors as JSON values and named tensors, and back: all that a checkpoint can hold.

Only these may occur: None, bool, int, float, str, bytes, list, tuple, set, dict, torch.Tensor, numpy arrays, numbers.
Anything else is refused at the save, with its place in the tree; nothing is ever pickled.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

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


class UnsavableState(SpothealError, TypeError):
    """A value of the state has a type that cannot be saved without executing code at the load."""


def pack(tree: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """The tensors of `tree` by name, and the rest as values for JSON. UnsavableState names the place of a fault."""
    tensors: dict[str, torch.Tensor] = {}
    try:
        return tensors, _pack(tree, "", tensors, 0)
    except RecursionError:
        raise no_stack() from None


def unpack(values: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The tree again. ValueError, KeyError, TypeError or RecursionError if `values` was not made by `pack`."""
    return _unpack(values, {name: _at_its_own_start(tensor) for name, tensor in tensors.items()}, {}, 0)


_GENERATOR_BYTES_MAX = 8192  # torch's on the CPU takes 5056


def _at_its_own_start(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor that may be the state of a torch.Generator, which a part keeps; other values as they are.

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
    # Fewer brackets cannot lie deeper; and a value that holds itself was refused before.
    if text.count("[") + text.count("{") > JSON_NESTING_MAX and nested_beyond(values, JSON_NESTING_MAX):
        raise _too_deep(_place_beyond(values, JSON_NESTING_MAX), JSON_NESTING_MAX)
    return text


def _place_beyond(values: Any, levels: int) -> str:
    """Where something lies in more than `levels` levels, as the first of them on each."""
    inside = [("", values)]
    for _ in range(levels):
        inside = [
            (f"{place}/{key}", item)
            for place, value in inside
            for key, item in (value.items() if isinstance(value, dict) else enumerate(value))
            if isinstance(item, (dict, list, tuple))
        ]
    return inside[0][0][1:]


def _too_deep(place: str, levels: int) -> UnsavableState:
    return UnsavableState(
        f"{_place_text(place)} lies in more than {levels} containers, one in the other, or the state holds itself",
        next_step="give it in a flatter form: a list of the parts, or a dict by their paths",
    )


def no_stack() -> UnsavableState:
    """For a RecursionError of a state that is not too deep by itself, as far as is known."""
    return UnsavableState(
        "the state cannot be taken apart so deep in the interpreter's stack",
        next_step="save from a function that is called less deeply, or raise `sys.setrecursionlimit`",
    )


def _place_text(place: str) -> str:
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
                f"{_place_text(place)} is a numpy {_kind(value)}: not savable",
                next_step="give it as numbers that torch has too (`.astype('float64')`), texts as a list of str",
            )
        if isinstance(plain, torch.Tensor):
            refuse_unsavable(plain, place)
            place = _unused(place, tensors)
            tensors[place] = plain
            return {"$array": place}
        return _pack(plain, place, tensors, depth)
    raise UnsavableState(
        f"{_place_text(place)} is a {type(value).__name__}, which cannot be saved without executing code at the load",
        next_step="give its numbers as int, float, str, list, dict or tensor in state_dict()",
    )


def refuse_unsavable(tensor: torch.Tensor, place: str) -> None:
    """UnsavableState for one that has no content, or that no safetensors file holds: not so, or not under this name."""
    flaw = next_step = ""
    if torch.nn.parameter.is_lazy(tensor):  # first: it has neither a size nor a number of dimensions
        flaw = "a parameter of a lazy module that has not seen an input, so it has no shape yet"
        next_step = "call the model once before the first save"
    elif tensor.is_nested:
        flaw, next_step = "a nested tensor", "save its parts, `tensor.unbind()`, as a list"
    elif tensor.dtype not in FORMAT_DTYPE or tensor.layout is not _STRIDED:
        flaw = f"a tensor of {tensor.dtype}, {tensor.layout}: not savable"
        next_step = "save a dense tensor of another type, or its parts: `indices()` and `values()`, `real` and `imag`"
    elif tensor.is_meta:
        flaw = "a tensor on the meta device, which has no content"
        next_step = "give the model memory (`to_empty`) and its values before it is saved"
    elif tensor.dim() > DIMENSIONS_MAX:
        flaw = f"a tensor of {tensor.dim()} dimensions: not savable"
        next_step = f"reshape it to at most {DIMENSIONS_MAX}"
    elif place in RESERVED_NAMES:
        flaw, next_step = "a name of the file format's own: no tensor can have it", "give that tensor another key"
    if flaw:
        raise UnsavableState(f"{_place_text(place)} is {flaw}", next_step=next_step)


def _kind(value: Any) -> str:
    return f"{type(value).__name__} of {value.dtype}" if hasattr(value, "dtype") else type(value).__name__


def _unused(place: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """`a/b` of {"a": {"b": ...}} and of {"a/b": ...} must not be one name."""
    while place in tensors:
        place += "'"
    return place
