"""Would IAM allow this? Policies evaluated with their conditions, which the local clouds that others make leave out.

As far as our own documents go: `Allow` and `Deny`, wildcards, and the condition operators named in `_OPERATORS`. What
it does not know is an error, never a guess. Source: IAM user guide, "Policy evaluation logic" and "IAM JSON policy
elements: Condition operators".
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Values = Sequence[str]
Context = Mapping[str, Values]  # condition key -> its values; a key that the request has not is absent


@dataclass(frozen=True)
class Question:
    """One authorization: an API call asks several, one a resource and action, and needs yes to all."""

    action: str
    resource: str
    context: Context = field(default_factory=dict)


def is_allowed(documents: Iterable[Mapping[str, Any]], question: Question) -> bool:
    """An explicit deny wins, then any allow; nothing is a no. ValueError where a document holds what is not known."""
    allowed = False
    for document in documents:
        for statement in _list(document["Statement"]):
            if not _applies(statement, question):
                continue
            if statement["Effect"] == "Deny":
                return False
            allowed = True
    return allowed


def _applies(statement: Mapping[str, Any], question: Question) -> bool:
    strange = set(statement) - {"Sid", "Effect", "Action", "Resource", "Condition"}
    if strange or statement["Effect"] not in ("Allow", "Deny"):
        raise ValueError(f"cannot evaluate {sorted(strange) or statement['Effect']}")
    return (
        any(_like(question.action.lower(), pattern.lower()) for pattern in _list(statement["Action"]))
        and any(_like(question.resource, pattern) for pattern in _list(statement["Resource"]))
        and all(
            _holds(operator, key, _list(wanted), question.context)
            for operator, keys in statement.get("Condition", {}).items()
            for key, wanted in keys.items()
        )
    )


def _holds(operator: str, key: str, wanted: list[str], context: Context) -> bool:
    given = next((values for name, values in context.items() if name.lower() == key.lower()), None)
    if operator == "Null":
        return (given is None) == (str(wanted[0]).lower() == "true")
    quantifier, _, plain = operator.rpartition(":")
    plain, if_exists = plain.removesuffix("IfExists"), plain.endswith("IfExists")
    if plain not in _OPERATORS or quantifier not in ("", "ForAllValues", "ForAnyValue"):
        raise ValueError(f"cannot evaluate the condition operator {operator}")
    if not given:
        return if_exists or quantifier == "ForAllValues"
    matches = [_OPERATORS[plain](value, wanted) for value in given]
    return all(matches) if quantifier == "ForAllValues" else any(matches)


def _like(value: str, pattern: str) -> bool:
    return _compiled(pattern).fullmatch(value) is not None


@functools.lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile("".join(_WILD.get(c, re.escape(c)) for c in pattern), re.DOTALL)


_WILD = {"*": ".*", "?": "."}
_OPERATORS = {
    "StringEquals": lambda value, wanted: value in wanted,
    "StringNotEquals": lambda value, wanted: value not in wanted,
    "StringLike": lambda value, wanted: any(_like(value, pattern) for pattern in wanted),
    "ArnLike": lambda value, wanted: any(_like(value, pattern) for pattern in wanted),
    "Bool": lambda value, wanted: value.lower() in [str(one).lower() for one in wanted],
}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
