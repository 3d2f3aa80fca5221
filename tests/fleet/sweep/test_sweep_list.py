"""Lists of parameters as people, and as nobody in his right mind, write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spotheal.agent.protocol.errors import ConfigError
from spotheal.fleet.sweep import entries
from spotheal.training.params import LIST, params

BOMB = "- &a {x: 1}\n" + "".join(
    f"- &{new} {{k: [{', '.join([f'*{old}'] * 9)}]}}\n" for old, new in zip("abcdefghij", "bcdefghijk", strict=True)
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001), ("-5E+4", -5e4), ("1.5e3", 1500.0), (".5e-2", 0.005), ("1e3", 1000.0), ("0.1", 0.1), ("3", 3),
        ("1_000e-3", 1.0), ("e-3", "e-3"), ("1e", "1e"), ("1e-3x", "1e-3x"), ("'1e-3'", "1e-3"), ("1-e3", "1-e3"),
        ("deadbe3f", "deadbe3f"), ("yes", True), ("~", None),
    ],
)  # fmt: skip
def test_numbers_are_what_they_look_like_from_the_fleet_and_by_hand(
    text: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyYAML reads `lr: 1e-3` as text, and the optimizer gets `"1e-3"`."""
    (tmp_path / "list.yml").write_text(f"- {{lr: {text}}}\n")
    monkeypatch.setenv(LIST, str(tmp_path / "list.yml"))
    found = entries.parse(f"- {{lr: {text}}}\n", "list.yml")[0]["lr"]
    assert found == value and type(found) is type(value)
    assert params(0)["lr"] == value


@pytest.mark.parametrize(
    "text", ["\u2028", "line\nbreak", "\x1b[2J", "日本", "😀", "'; rm -rf / #", "a" * 1_000_000, "\ufeff"]
)
def test_text_reaches_the_trainer_as_it_was_written(text: str) -> None:
    assert entries.parse(json.dumps([{"name": text}]), "list.json") == [{"name": text}]
    assert entries.parse(json.dumps([{"name": text}], ensure_ascii=False), "list.json") == [{"name": text}]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "its aliases make more than"),
        ("- &a {x: *a}\n", "its aliases make more than"),
        ('- {a: "\\ud800"}\n', "list.yml"),
        ('[{"a": "\\ud800"}]', "entry 0: a: must be numbers"),
        ('[{"a": NaN}]', "entry 0: a: must be numbers"),
        ("- {a: " + "[" * 5000 + "]" * 5000 + "}\n", "list.yml"),
        ("- {a: " + "9" * 5000 + "}\n", "list.yml"),
        ("- {a: .inf}\n", "entry 0: a: must be numbers"),
        ("- {a: 1e999}\n", "entry 0: a: must be numbers"),
        ("- {a: !!binary aGk=}\n", "entry 0: a: must be numbers"),
        ("- {? [1] : 2}\n", "list.yml"),
        ("- {a: 1}\n--- \n- {a: 2}\n", "is no YAML"),
        ("\x00", "is no YAML"),
    ],
)
def test_what_no_trainer_can_be_given_is_one_message(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        entries.parse(text, "list.yml")
    assert said in caught.value.message
