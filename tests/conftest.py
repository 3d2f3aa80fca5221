"""What several test modules share. Nothing here imports torch before a test asks for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# What tests share (imds_server, training_runs, …) is imported by its bare name, whichever import mode pytest uses.
for _folder in ("worlds", "harness", ""):
    if (_path := str(Path(__file__).parent / _folder)) not in sys.path:
        sys.path.insert(0, _path)

# moto makes 1,300 images, each with a volume and a snapshot, whenever its EC2 is begun anew: seconds of a test.
os.environ.setdefault("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")

import aws_calls
import longest_first

_wrong = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def torchvision() -> Any:
    """See torchvision_here."""
    from torchvision_here import torchvision_here

    return torchvision_here()


@pytest.fixture(autouse=True)
def no_accelerator_of_another_test() -> Iterator[None]:
    """Accelerate's state belongs to the process: a test that accumulates gradients left the next one without steps."""
    yield
    if accelerate := sys.modules.get("accelerate.state"):
        accelerate.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.GradientState._reset_state()


# --------------------------------------------------------------------- which worker runs what, and when (longest_first)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: longest_first.place(item.nodeid.partition("::")[0]))


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return longest_first.scheduler(config, log) if config.getvalue("dist") == "loadfile" else None


# ----------------------------------------------------------------------- calls of AWS against the policies (aws_calls)
def pytest_collection_finish(session: pytest.Session) -> None:
    """By now every test module is imported, and with it whatever answers as AWS."""
    if not session.config.option.collectonly:
        aws_calls.record(sys.modules)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker of xdist has ended: what it noted."""
    aws_calls.notes.update((who, action) for who, action in getattr(node, "workeroutput", {}).get("aws_calls", ()))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["aws_calls"] = sorted(aws_calls.notes)
        return
    is_whole = exitstatus == pytest.ExitCode.OK and _runs_everything(config)
    wrong = aws_calls.faults(aws_calls.notes, aws_calls.allowed(), is_whole) if aws_calls.notes else []
    config.stash[_wrong] = wrong
    if wrong and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if wrong := config.stash.get(_wrong, []):
        terminalreporter.section("calls of AWS against the policies of iam/", red=True)
        for line in wrong:
            terminalreporter.write_line(line)


def _runs_everything(config: pytest.Config) -> bool:
    """Only then is a permission without a call one that nothing needs."""
    option = config.option
    chosen = (option.keyword, option.markexpr, option.deselect, option.ignore, option.ignore_glob,
              getattr(option, "lf", False), option.collectonly)  # fmt: skip
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not any(chosen)
