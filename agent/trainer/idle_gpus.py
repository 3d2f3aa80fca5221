"""Ranks that do not know of each other, or a trainer that uses one GPU of four: seen by who holds which GPU.

nvidia-smi lists the processes on each GPU. Where training gains steps and, twice in a row, fewer GPUs have one than
ranks were started, the others are paid for and idle: a month of such a run is lost without a line in any log.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from spotheal.agent.processes import programs
from spotheal.agent.protocol.clock import Clock, Stop
from spotheal.agent.protocol.errors import SpothealError

FIRST_SECONDS = 60.0  # of training before the first look: frameworks touch the other GPUs late
AGAIN_SECONDS = 30.0
_QUERY = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"]
_POLL_SECONDS = 5.0


def gpus_in_use() -> int:
    """GPUs with at least one process; 0 where none is seen (no driver, or a container that hides processes)."""
    try:
        answer = programs.run(_QUERY, seconds_max=60)
    except SpothealError:
        return 0
    if answer.code != 0:
        return 0
    return len({line.split(",")[0].strip() for line in answer.out.splitlines() if "," in line})


def watch(
    expected: int,
    trains: Callable[[], bool],
    tell: Callable[[str], None],
    clock: Clock,
    over: Stop,
    *,
    first_seconds: float = FIRST_SECONDS,
    again_seconds: float = AGAIN_SECONDS,
) -> None:
    """Wait until `trains()`, look twice, and `tell` where GPUs are idle. Returns when that is known, or at `over`."""
    while not trains():
        if clock.sleep(_POLL_SECONDS, until=over):
            return
    for seconds in (first_seconds, again_seconds):
        if clock.sleep(seconds, until=over):
            return
        used = gpus_in_use()
        if used == 0 or used >= expected:
            return
    tell(
        f"only {used} of {expected} GPUs have a process while training goes on: it is not distributed"
        " (does the script call init_process_group, and does each rank use the GPU of its LOCAL_RANK?)"
    )


def start(expected: int, trains: Callable[[], bool], tell: Callable[[str], None], clock: Clock, over: Stop) -> None:
    """`watch`, in a thread of its own: nvidia-smi may take long."""
    work = threading.Thread(target=watch, args=(expected, trains, tell, clock, over), name="idle-gpus", daemon=True)
    work.start()
