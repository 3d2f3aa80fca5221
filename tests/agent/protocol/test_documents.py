"""The documents of the store: what is written is read, also by and from other versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from spotheal.agent.protocol.documents import Claim, Document

OLD = Path(__file__).parents[2] / "data/store_of_f972a6a"
ANYTHING = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False) | some.text(max_size=5),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
DOCUMENTS: dict[type[Document], dict[str, Any]] = {Claim: {"number": 1, "instance": "i-1", "zone": "z", "time": "t"}}


def old(name: str) -> dict[str, Any]:
    document = json.loads((OLD / name).read_text())
    assert isinstance(document, dict)
    return document


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_field_of_another_version_is_kept(kind: type[Document]) -> None:
    document = {**DOCUMENTS[kind], "new": {"a": [1]}}
    written = kind.from_json(document).to_json()
    assert document == {name: written[name] for name in document}
    assert kind.from_json(document) == kind.from_json(written)


@pytest.mark.parametrize("kind", DOCUMENTS)
@given(data=some.data())
def test_a_field_may_say_anything(kind: type[Document], data: some.DataObject) -> None:
    document = {name: data.draw(ANYTHING) for name in kind(**DOCUMENTS[kind]).to_json()}
    try:
        read = kind.from_json(document)
    except TypeError as fault:
        assert "missing" in str(fault), "a document without a field that it must have"
    else:
        assert kind.from_json(read.to_json()) == read


def test_a_value_of_another_type_counts_as_absent() -> None:
    with pytest.raises(TypeError, match="number"):
        Claim.from_json({"number": True, "instance": "i-1", "zone": "z", "time": "t"})


def test_a_claim_of_f972a6a_is_read() -> None:
    assert Claim(1, "i-07a024204f7c1bd87", "us-west-2a", "2026-01-23T04:37:57Z") == Claim.from_json(old("terms/1"))
