"""The example trainer's options: what is wrong with one is said in one line, before torch is loaded."""

from __future__ import annotations

import pytest

from spotheal.training.options import parser

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
    ("--workers", "-1", "must be 0 or more, and is -1"),
    ("--threads", "-2", "must be 0 or more, and is -2"),
    ("--milestones", "-1", "must be 0 or more, and is -1"),
    ("--step-seconds", "nan", "must be 0 or more, and is nan"),
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
