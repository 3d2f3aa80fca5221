"""`spotheal.training.params`: the entry of a sweep, and nothing outside of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotheal.agent.contract import INDEX, PARAMS_FILE
from spotheal.training.params import index, params


@pytest.fixture(autouse=True)
def no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INDEX, raising=False)
    monkeypatch.delenv(PARAMS_FILE, raising=False)


def test_outside_of_a_sweep_the_defaults_hold() -> None:
    assert params(default={"lr": 0.1}) == {"lr": 0.1}
    assert index() is None


def test_the_entry_goes_over_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "params.json").write_text('{"lr": 0.5, "hidden_nodes": [10, 20]}')
    monkeypatch.setenv(PARAMS_FILE, str(tmp_path / "params.json"))
    monkeypatch.setenv(INDEX, "7")
    assert params(default={"lr": 0.1, "epochs": 3}) == {"lr": 0.5, "epochs": 3, "hidden_nodes": [10, 20]}
    assert index() == 7


def test_a_name_that_the_trainer_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('{"droput": 0.5}')
    with pytest.raises(ValueError, match="has droput; the trainer knows dropout, lr"):
        params(known={"lr", "dropout"}, path=tmp_path / "p.json")


@pytest.mark.parametrize(("text", "said"), [("[1]", "one mapping"), ("{", "is not JSON"), ("", "is not JSON")])
def test_a_file_that_is_no_entry_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        params(path=tmp_path / "p.json")
    with pytest.raises(ValueError, match="cannot be read"):
        params(path=tmp_path / "none.json")
