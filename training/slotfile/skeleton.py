"""The structure of a state, kept between saves: the next state of the same structure is taken apart in a few calls.

`packing.pack` looks at every value in Python, some 4 us each, while the training waits. Two saves of one run differ in
numbers alone: then comparing keys and types as whole lists is enough, and the text is filled in by the writer.
"""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spotheal.training.slotfile.packing import no_stack, pack, to_json

_CONTAINERS = (dict, OrderedDict, list, tuple)  # exactly these: a subclass may hold more than its items
_LEAVES = (type(None), bool, int, float, str, bytes)  # and these: others may change behind our back
_KEYS = (str, int)


@dataclass(frozen=True)
class _Node:
    """One container: what its keys or its number of items must be, and which of its items are containers."""

    kind: Any  # the type
    keys: list[Any] | None
    key_types: list[type] | None
    size: int
    inner: tuple[tuple[int, _Node], ...]


class _Different(Exception):
    pass


class Skeleton:
    """The structure of `tree`. UnsavableState as `pack`. `exact` False: it holds what only `pack` can look at.

    Shapes and types of tensors are not part of it: see Plan, which is asked when the tensors are looked at anyway.
    Where not exact, `tensors` and `values` are what `pack` gives.
    """

    def __init__(self, tree: Any) -> None:
        self.tensors, self.values = pack(tree)
        leaves: list[Any] = []
        try:
            root = _node(tree, leaves)
        except RecursionError:
            raise no_stack() from None
        self.exact = root is not None
        if root is None:
            return
        self._root = root
        self._kinds = list(map(type, leaves))
        # pack says where every leaf goes: it is given the tree with a mark of its own in the place of each.
        token = secrets.token_hex(8)
        numbers: dict[int, int] = {}
        marks: list[torch.Tensor] = []

        def mark(index: int, leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return f"{token}:{index}:"
            marks.append(torch.empty(0))
            numbers[id(marks[-1])] = index
            return marks[-1]

        try:
            named, marked = pack(_replaced(tree, root, leaves, mark))
        except RecursionError:
            raise no_stack() from None
        text = to_json(marked)
        self._at = [numbers[id(tensor)] for tensor in named.values()]
        self.names = tuple(named)
        pieces = re.split(f'"{token}:(\\d+):"', text)
        self._fixed, self._holes = pieces[::2], [int(index) for index in pieces[1::2]]
        self.tensors, self.values = {}, None  # the skeleton outlives the state

    def leaves(self, tree: Any) -> list[Any] | None:
        """The leaves of `tree`, in an order of their own; None if its structure is another one."""
        leaves: list[Any] = []
        try:
            _walk(self._root, tree, leaves)
        except (_Different, RecursionError):  # so deep in the stack: a new skeleton says so
            return None
        return leaves if list(map(type, leaves)) == self._kinds else None

    def sources(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """The tensors among `leaves` in the order of `names`, as `pack` orders them, not detached."""
        return [leaves[index] for index in self._at]

    def plain(self, leaves: Sequence[Any]) -> list[Any]:
        """What `text` needs of `leaves`; it keeps no tensor alive."""
        return [leaves[index] for index in self._holes]

    def text(self, plain: Sequence[Any]) -> str:
        """The rest of the state as JSON, the same as `to_json(pack(tree)[1])` with the tree's `plain` leaves."""
        texts = [to_json(pack(value)[1]) for value in plain]
        return self._fixed[0] + "".join(text + fixed for text, fixed in zip(texts, self._fixed[1:], strict=True))


def _node(value: Any, leaves: list[Any]) -> _Node | None:
    """The structure of a container, its leaves added to `leaves`; None if something in it is not exact."""
    kind = type(value)
    if not isinstance(value, (dict, list, tuple)) or kind not in _CONTAINERS:
        return None
    keys = list(value) if isinstance(value, dict) else None
    items = list(value.values()) if isinstance(value, dict) else list(value)
    if keys is not None and not all(type(key) in _KEYS for key in keys):
        return None
    if not all(type(item) in (*_CONTAINERS, *_LEAVES) or isinstance(item, torch.Tensor) for item in items):
        return None
    leaves += items
    inner = []
    for index, item in enumerate(items):
        if type(item) in _CONTAINERS:
            node = _node(item, leaves)
            if node is None:
                return None
            inner.append((index, node))
    key_types = list(map(type, keys or ()))
    # Nothing else equals a text; True and 1.0 equal 1.
    return _Node(kind, keys, key_types if set(key_types) - {str} else None, len(items), tuple(inner))


def _walk(node: _Node, value: Any, leaves: list[Any]) -> None:
    if type(value) is not node.kind:
        raise _Different
    if node.keys is None:
        items = list(value)
        if len(items) != node.size:
            raise _Different
    else:
        keys = list(value)
        if keys != node.keys or (node.key_types is not None and list(map(type, keys)) != node.key_types):
            raise _Different
        items = list(value.values())
    leaves += items
    for index, inner in node.inner:
        _walk(inner, items[index], leaves)


def _replaced(value: Any, node: _Node, leaves: Sequence[Any], mark: Callable[[int, Any], Any]) -> Any:
    """`value` with `mark(index, leaf)` for every leaf; `index` is its place in `leaves`."""
    at = 0

    def rebuilt(value: Any, node: _Node) -> Any:
        nonlocal at
        begin, at = at, at + node.size
        inner = dict(node.inner)
        items = list(value.values()) if node.keys is not None else list(value)
        new = [
            rebuilt(item, inner[index]) if index in inner else mark(begin + index, item)
            for index, item in enumerate(items)
        ]
        return node.kind(zip(node.keys, new, strict=True)) if node.keys is not None else node.kind(new)

    return rebuilt(value, node)
