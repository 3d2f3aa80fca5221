"""The example trainer's options: what is wrong with one is said in one line, before torch is loaded."""

from __future__ import annotations

import pytest

from spotheal.agent.protocol.errors import ConfigError
from spotheal.training.example.options import of_entry, parser, settled

WRONG = [
    ("--ema", "7", "must be a number from 0 to below 1, and is 7"),
    ("--ema", "nan", "must be a number from 0 to below 1, and is nan"),
    ("--lr", "inf", "must be a number above 0, and is inf"),
    ("--lr", "fast", "invalid float value: 'fast'"),
    ("--warmup", "-0.1", "must be a number from 0 to 1, and is -0.1"),
    ("--weight-decay", "-1", "must be a number from 0 on, and is -1"),
    ("--dropout-rate", "1", "must be a number from 0 to below 1, and is 1"),
    ("--epochs", "0", "must be a whole number from 1 to 1048576, and is 0"),
    ("--batch-size", "1.5", "invalid int value: '1.5'"),
    ("--seed", "-1", "must be a whole number from 0 to 9223372036854775807, and is -1"),
    ("--interruption-hours", "0", "must be above 0, and is 0"),
    ("--workers", "-1", "must be from 0 to 1024, and is -1"),
    ("--workers", "1025", "must be from 0 to 1024, and is 1025"),
    ("--threads", "-2", "must be from 0 to 4096, and is -2"),
    ("--threads", "4097", "must be from 0 to 4096, and is 4097"),
    ("--milestones", "-1", "must be 0 or more, and is -1"),
    ("--step-seconds", "nan", "must be from 0 to 86400, and is nan"),
    ("--step-seconds", "1e9", "must be from 0 to 86400, and is 1e9"),
    ("--slots", "1", "2 at least: while one is written another must be whole"),
    ("--model", "vgg", "invalid choice: 'vgg'"),
]


@pytest.mark.parametrize(("option", "value", "what"), WRONG, ids=[f"{option}={value}" for option, value, _ in WRONG])
def test_a_wrong_value_is_refused_in_one_line_with_the_next_step(
    option: str, value: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args([f"{option}={value}"])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith(f"error: argument {option}: ") and what in said
    assert said.splitlines()[1:] == ["  next: see `python -m spotheal.training --help`"]


def test_an_unknown_option_is_refused_alike(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["--epoch-count", "3"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: unrecognized arguments: --epoch-count 3\n  next: ")


def test_the_beginning_of_an_option_is_not_taken_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--epoch", "3"])
    assert "unrecognized arguments: --epoch 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--hidden-nodes", "8"], "--hidden-nodes"),
        (["--dropout-rate", "0.5", "--model", "mlp"], "--dropout-rate"),
        (["--activate-fn", "relu", "--hidden-nodes", "8"], "--hidden-nodes, --activate-fn"),
    ],
)
def test_the_network_of_dense_is_refused_for_any_other_model(given: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        of_entry(parser().parse_args(["--dataset", "digits", *given]), {}, None)
    assert refused.value.message == f"{named}: only --model dense has it, and the model is mlp"
    assert "--model dense" in refused.value.next_step


def test_the_network_of_dense_is_taken_where_the_entry_is_of_that_model_or_names_its_own() -> None:
    chosen = parser().parse_args(["--dataset", "digits", "--hidden-nodes", "8"])
    assert settled(of_entry(chosen, {"dropout_rate": 0.1}, 0)).hidden_nodes == [8]
    assert of_entry(chosen, {"model": "mlp"}, 1).model == "mlp"
    figures = settled(of_entry(parser().parse_args(["--model", "dense"]), {}, None))
    assert (figures.hidden_nodes, figures.dropout_rate, figures.activate_fn) == ([10, 20, 30], 0.5, "relu")


def test_the_help_names_the_folders_variables_and_what_zero_milestones_are() -> None:
    text = " ".join(parser().format_help().split())
    for name in ("SPOTHEAL_DATASETS_DIR", "SPOTHEAL_CHECKPOINT_DIR", "SPOTHEAL_RESULTS_DIR"):
        assert name in text
    assert "for good; 0, the default, keeps none" in text
