"""Everything that makes a resume exact, gathered as one tree of plain values and tensors, and restored from it."""

from __future__ import annotations

import ctypes
import hashlib
import json
import random
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import torch

from spotheal.agent.protocol.errors import SpothealError
from spotheal.training.slotfile.packing import pack


class Stateful(Protocol):
    """The interface that torch's modules, optimizers, schedulers, scalers and our sampler share."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


# ----------------------------------------------------------------------------------------------------------- the RNGs
def rng_state() -> dict[str, Any]:
    """The state of every generator a training draws from: python, numpy (if it is imported), torch, CUDA."""
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
    """Restore every generator. Generators of CUDA devices that are gone are left out."""
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
    """The same as torch.optim.Optimizer.state_dict. Source: torch/optim/optimizer.py, state_dict."""
    numbers: dict[int, int] = {}
    groups, start = [], 0
    for group in optimizer.param_groups:
        ids = list(map(id, group["params"]))
        numbers |= {ident: number for number, ident in enumerate(ids, start) if ident not in numbers}
        start += len(ids)
        packed = {name: value for name, value in group.items() if name != "params"}
        groups.append(packed | {"params": [numbers[ident] for ident in ids]})
    tensor = torch.Tensor
    entries = {numbers[id(key)] if isinstance(key, tensor) else key: value for key, value in optimizer.state.items()}
    return {"state": entries, "param_groups": groups}


_PLAIN: dict[type, bool] = {torch.nn.Module: True}  # classes that leave state_dict alone
_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")


def _collect(module: torch.nn.Module, prefix: str, tensors: dict[str, Any]) -> bool:
    """The same as torch.nn.Module.state_dict, in its order; False if the module has a way of its own.

    Most modules have one or none of each, and every look at one costs as much as its memory is away.
    Source: torch/nn/modules/module.py, state_dict and _save_to_state_dict.
    """
    kind = type(module)
    plain = _PLAIN.get(kind)
    if plain is None:
        plain = _PLAIN[kind] = all(getattr(kind, name) is getattr(torch.nn.Module, name) for name in _METHODS)
    attributes = module.__dict__
    if (
        not plain
        or "_parameters" not in attributes
        or attributes["_state_dict_hooks"]
        or attributes["_state_dict_pre_hooks"]
    ):
        return False  # a traced module has no such dictionaries
    if "state_dict" in attributes or "_save_to_state_dict" in attributes or "get_extra_state" in attributes:
        return False
    if parameters := attributes["_parameters"]:
        for name, parameter in parameters.items():
            if parameter is not None:
                tensors[prefix + name] = parameter
    if buffers := attributes["_buffers"]:
        passing = attributes["_non_persistent_buffers_set"]
        for name, buffer in buffers.items():
            if buffer is not None and name not in passing:
                tensors[prefix + name] = buffer
    if children := attributes["_modules"]:
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
    values = chain.from_iterable(value.values() for value in optimizer.state.values() if isinstance(value, dict))
    if but:
        left_out = set(map(id, but))
        tensors = [tensor for tensor in tensors if id(tensor) not in left_out]
    return tensors + [value for value in values if isinstance(value, torch.Tensor)]


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
