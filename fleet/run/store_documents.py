"""Documents of a run lie in a store that more than one program writes: what they hold may be of any type and size."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from spotheal.agent.protocol.errors import Fatal

Given = ParamSpec("Given")
Made = TypeVar("Made")


def sensible(function: Callable[Given, Made]) -> Callable[Given, Made]:
    """Fatal where `function` stumbles over the types or numbers in what it was given.

    To check each field where it is used would be a page of code for what no agent writes; SPOTHEAL_DEBUG=1 shows where.
    """

    @functools.wraps(function)
    def guarded(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError) as fault:
            raise Fatal(
                f"a document of the run in the store holds what no agent writes ({type(fault).__name__}: {fault})",
                next_step="look at status.json, ledger.jsonl and launches/ below the run's prefix; if another version "
                "of fleetctl wrote them, use that one",
            ) from fault

    return guarded
