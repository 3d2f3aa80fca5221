"""Processes forked from a server that has torch imported: a start takes 0.1 s, where torch alone takes 3.

The server's own start takes longer than that: `longest_first.TOGETHER` keeps the tests that need one in one worker.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
_LOOKED_IN = (_TESTS / "harness", _TESTS / "worlds", _TESTS.parent / ".ci" / "import_path")
_PRELOAD = (
    "pytest",
    *("spotheal.training.__main__", "spotheal.training.example.build", "spotheal.training.example.export"),
    "sklearn.datasets",
    *("torch._dynamo", "torch.optim"),  # the first optimizer imports it, in 1.5 s
    *("torch.distributed", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"),
    *("spotheal.training.sharded_session", "spotheal.training.elastic", "interrupted"),
)
_loaded = set(_PRELOAD)


def context(*more: str) -> ForkServerContext:
    """For `context().Process(...)`. A server that has not imported `more` makes room for one that has."""
    made = multiprocessing.get_context("forkserver")
    if not _loaded.issuperset(more):
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
        _loaded.update(more)
    made.set_forkserver_preload(sorted(_loaded))
    before = os.environ.get("PYTHONPATH")
    try:
        # The server of Python 3.11.7 and older does not look where we look, and leaves out in silence what it misses.
        os.environ["PYTHONPATH"] = os.pathsep.join(map(str, _LOOKED_IN))
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return made


def script(path: Path, environment: Mapping[str, str]) -> BaseProcess:
    """`python PATH` with more in its environment."""
    process = context().Process(target=_run, args=(str(path), dict(environment)))
    process.start()
    return process


def _run(path: str, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    runpy.run_path(path, run_name="__main__")
