"""Several programs write a run's documents in the store: their fields may have any type and size."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from spotheal.agent.protocol.errors import Fatal

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


def sensible(function: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
    """Fatal if `function` fails over the types or numbers in its documents.

    A check of each field would be a page of code for values that no agent writes; SPOTHEAL_DEBUG=1 shows the place.
    """

    @functools.wraps(function)
    def guarded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError) as fault:
            raise Fatal(
                f"a document of the run in the store holds what no agent writes ({type(fault).__name__}: {fault})",
                next_step="look at status.json, ledger.jsonl and launches/ below the run's prefix; if another version "
                "of fleetctl wrote them, use that one",
            ) from fault

    return guarded
