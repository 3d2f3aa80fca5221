"""`spotheal.training.params`: the entry of a sweep below the agent, an entry of any list by hand, nothing elsewhere."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spotheal.agent.protocol.contract import BATCH_INDEX, INDEX, PARAMS_FILE
from spotheal.agent.protocol.errors import ConfigError
from spotheal.training.example import hyperparameters
from spotheal.training.params import LIST, BadParams, index, params

ROOT = Path(__file__).resolve().parents[2]
ARTICLE = ROOT / "examples" / "hyperparam_list.yml"
SWEEPS = ROOT / "docs" / "sweeps.md"


@pytest.fixture(autouse=True)
def no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (INDEX, BATCH_INDEX, PARAMS_FILE, LIST):
        monkeypatch.delenv(name, raising=False)


def test_outside_of_a_sweep_the_defaults_hold() -> None:
    assert params(default={"lr": 0.1}) == {"lr": 0.1}
    assert index() is None


# ------------------------------------------------------------------------------------------------------ below the agent
@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run 7 of a sweep."""
    path = tmp_path / "params.json"
    path.write_text('{"lr": 0.5, "hidden_nodes": [10, 20]}')
    monkeypatch.setenv(PARAMS_FILE, str(path))
    monkeypatch.setenv(INDEX, "7")
    return path


def test_the_entry_goes_over_the_defaults(entry: Path) -> None:
    assert params(default={"lr": 0.1, "epochs": 3}) == {"lr": 0.5, "epochs": 3, "hidden_nodes": [10, 20]}
    assert (index(), params(7)) == (7, params())


def test_another_runs_entry_is_refused(entry: Path) -> None:
    with pytest.raises(BadParams, match="this is run 7 of the sweep, and entry 8 is another run's"):
        params(8)


def test_a_name_that_the_trainer_does_not_know_is_refused_with_its_entry(entry: Path) -> None:
    entry.write_text('{"droput": 0.5}')
    with pytest.raises(ConfigError, match="entry 7 has droput; the trainer knows dropout, lr"):
        params(known={"lr", "dropout"})


@pytest.mark.parametrize(("text", "said"), [("[1]", "one mapping"), ("{", "is not JSON"), ("", "is not JSON")])
def test_a_file_that_is_no_entry_is_named(entry: Path, text: str, said: str) -> None:
    entry.write_text(text)
    with pytest.raises(ValueError, match=said):
        params()
    entry.unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        params()


# -------------------------------------------------------------------------------------------------------------- by hand
def test_the_articles_list_gives_an_entry_by_argument_and_by_batchs_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BATCH_INDEX, "1")
    monkeypatch.setenv(LIST, str(ARTICLE))
    assert params() == params(1, source=ARTICLE)
    assert (params()["activate_fn"], params(0)["activate_fn"]) == ("tanh", "relu")


@pytest.mark.parametrize(
    ("text", "asked", "said"),
    [
        ("- {a: 1}\n- {a: 2}", 2, "there is no entry 2 in .*: it has 2, 0 to 1"),
        ("- {a: 1}", -1, "must be a whole number from 0 on, and is -1"),
        ("- {a: 1}", "x", "must be a whole number from 0 on, and is 'x'"),
        ("- {a: 1}", True, "must be a whole number"),
        ("[]", 0, "has no entry"),
        ("", 0, "must be a list of mappings"),
        ("a: 1", 0, "must be a list of mappings"),
        ("- 7", 0, "entry 0 of .* must be a mapping"),
        ("- {1: 2}", 0, "entry 0 of .* must be a mapping"),
        ("- {a: [1", 0, "is no YAML"),
    ],
)
def test_a_list_or_an_index_that_is_none_is_refused(tmp_path: Path, text: str, asked: Any, said: str) -> None:
    path = tmp_path / "list.yml"
    path.write_text(text)
    with pytest.raises(BadParams, match=said):
        params(asked, source=path)


@pytest.mark.parametrize("text", ["-1", "1.5", "", "seven"])
def test_an_index_that_is_none_names_its_variable(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BATCH_INDEX, text)
    with pytest.raises(BadParams, match=f"{BATCH_INDEX} must be a whole number"):
        params(source=ARTICLE)


def test_an_entry_without_a_list_and_a_list_without_an_index_ask_for_the_other() -> None:
    with pytest.raises(BadParams, match="no list to take entry 3 from"):
        params(3)
    with pytest.raises(BadParams, match="which entry of "):
        params(source=ARTICLE)


def test_a_list_in_s3_is_read_with_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3

    asked: list[dict[str, str]] = []

    class S3:
        def get_object(self, **where: str) -> dict[str, Any]:
            asked.append(where)
            return {"Body": io.BytesIO(b"- {lr: 0.1}")}

    monkeypatch.setattr(boto3, "client", lambda service: S3())
    assert params(0, source="s3://bucket/a/list.yml") == {"lr": 0.1}
    assert asked == [{"Bucket": "bucket", "Key": "a/list.yml"}]


def test_the_blocks_of_the_page_of_sweeps_run_as_they_stand(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3

    entry.write_text('{"batch_size": 8}')
    lists = SimpleNamespace(get_object=lambda **_: {"Body": io.BytesIO(b"[{}, {}, {}, {lr: 0.3}]")})
    monkeypatch.setattr(boto3, "client", lambda service: lists)
    found: list[dict[str, Any]] = []
    for block in re.findall(r"```python\n(.*?)```", SWEEPS.read_text(encoding="utf-8"), re.DOTALL):
        found.append({})
        exec(compile(block, SWEEPS.name, "exec"), found[-1])  # noqa: S102
    without, with_ours = found
    assert (without["params"], with_ours["p"]) == ({"batch_size": 8}, {"lr": 0.3})


# ------------------------------------------------------------------------------------------------ the example trainer's
def test_the_articles_entries_have_no_fault() -> None:
    assert [hyperparameters.faults(params(number, source=ARTICLE)) for number in (0, 1)] == [[], []]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"droput_rate": 0.5}, "droput_rate: is not known; the trainer knows hidden_nodes, dropout_rate, "),
        ({"hidden_nodes": 10}, "hidden_nodes: must be a list of at most 64 whole numbers from 1 to 65536, as [10, 20,"
                               " 30], and is 10"),
        ({"hidden_nodes": [10, 0]}, "hidden_nodes: must be a list"),
        ({"hidden_nodes": [True]}, "hidden_nodes: must be a list"),
        ({"dropout_rate": 1}, "dropout_rate: must be a number from 0 to below 1, and is 1"),
        ({"dropout_rate": "0.5"}, 'dropout_rate: must be a number from 0 to below 1, and is "0.5"'),
        ({"activate_fn": "softmaxx"}, "activate_fn: must be one of relu, tanh, "),
        ({"optimizer": "lion"}, "optimizer: must be one of sgd, rmsprop, "),
        ({"batch_size": 128.0}, "batch_size: must be a whole number from 1 to "),
        ({"epochs": 0}, "epochs: must be a whole number from 1 to "),
        ({"lr": None}, "lr: must be a number above 0, and is null"),
        ({"hidden_nodes": [10], "model": "mlp"}, "hidden_nodes: only the model dense has it, and the model is mlp"),
    ],
)  # fmt: skip
def test_what_an_entry_may_not_say_is_named_with_what_it_may(entry: dict[str, Any], said: str) -> None:
    (found,) = hyperparameters.faults(entry)
    assert found.startswith(said)


def test_the_commands_model_is_found_where_the_command_is_the_example_trainer() -> None:
    of = hyperparameters.command_model
    assert of(["python", "train.py", "--model", "x"]) is None
    assert of(["python", "-m", "spotheal.training"]) == ""
    assert of(["python3", "-X", "dev", "-m", "spotheal.training", "--model=mlp"]) == "mlp"
    assert of(["python", "-m", "spotheal.training", "--epochs", "3", "--model", "dense"]) == "dense"
