"""The documents of the store, as frozen dataclasses: the JSON keys are the names of the fields.

Several programs and versions write them. A value of another type than its field's counts as absent, and a field that
only another version knows is kept in `rest` and written again. Times are RFC 3339, UTC.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

AnyDocument = TypeVar("AnyDocument", bound="Document")


@dataclass(frozen=True)
class Document:
    """A JSON object. `rest`: fields of other versions. A field without a default is one that the document must have."""

    rest: Mapping[str, Any] = field(default_factory=dict, kw_only=True, hash=False, repr=False)

    _kinds: ClassVar[dict[str, tuple[type, ...]]] = {}  # of each field, the types that it may have beside None

    def __init_subclass__(cls) -> None:
        hints = {name: hint for name, hint in get_type_hints(cls).items() if name not in ("rest", "_kinds")}
        unions = {name: get_args(hint) if isinstance(hint, UnionType) else (hint,) for name, hint in hints.items()}
        cls._kinds = {name: tuple(get_origin(kind) or kind for kind in union) for name, union in unions.items()}

    @classmethod
    def from_json(cls: type[AnyDocument], document: Mapping[str, Any]) -> AnyDocument:
        """TypeError if a field is absent that has no default."""
        read = {name: _read(cls._kinds[name], value) for name, value in document.items() if name in cls._kinds}
        rest = {name: value for name, value in document.items() if name not in cls._kinds}
        return cls(**{name: value for name, value in read.items() if value is not None}, rest=rest)

    def to_json(self) -> dict[str, Any]:
        return {**self.rest, **{name: _written(getattr(self, name)) for name in self._kinds}}


def _read(kinds: tuple[type, ...], value: Any) -> Any:
    if isinstance(value, Mapping) and issubclass(kinds[0], Document):
        return kinds[0].from_json(value)
    if isinstance(value, bool):
        return value if bool in kinds else None
    return value if isinstance(value, kinds) or (float in kinds and isinstance(value, int)) else None


def _written(value: Any) -> Any:
    return value.to_json() if isinstance(value, Document) else value


@dataclass(frozen=True)
class Claim(Document):
    """`terms/<number>`: this instance is the writer from now on; every lower number is fenced."""

    number: int
    instance: str
    zone: str
    time: str
