"""torchrun over several machines that come and go: c10d's rendezvous, which a machine can also leave.

What torchrun alone does not do, and what is done here about it:
- A machine whose torchrun ends closes the rendezvous for all: here it leaves it, and the others go on.
- A machine that vanishes is noticed by its peers only when a collective fails, after minutes where its connections are
  not reset: here by its missing heartbeats, and the ranks are started again without it.
- Restarts are counted whatever the cause: here a round with other machines is none; one that failed with the same
  machines in it as before is the program's fault, and ends torchrun on all of them, for the agent to judge.
Source: torch/distributed/elastic of torch 2.13 (agent/server/api.py, rendezvous/dynamic_rendezvous.py).
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    _RendezvousExitOp,
)

from spotheal.agent.protocol import contract
from spotheal.agent.protocol.errors import SpothealError
from spotheal.training.distributed import World

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousInfo

# Seconds for ranks to save and end: when a machine joins; and when one is lost, for which a collective waits in vain.
JOINED_SECONDS_MAX, LOST_SECONDS_MAX = 240, 10
EXIT_BARRIER_SECONDS = 60.0  # between the end of the first machine's ranks and that of the last one's
LEAVE_SECONDS_MAX = 5.0
RESTARTS_MAX = 1_000_000  # the agent counts, by what was gained between them


class ProgramFailed(SpothealError):
    """The ranks failed, and the machines that they failed on are all still there."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.ended_with = exit_code


class Rendezvous(DynamicRendezvousHandler):
    """c10d's, with a way out. `failed`: how the first of this machine's ranks ended, if one has."""

    failed: tuple[int, int] | None = None  # its rank and exit code
    ours = False  # the ranks were stopped by us
    left = False
    _round: frozenset[Any] = frozenset()  # the machines of the round that we are or were in

    def next_rendezvous(self) -> RendezvousInfo:
        """As torchrun's. RendezvousGracefulExitError: this machine goes away. ProgramFailed. RendezvousError."""
        if _notice():
            self.leave()
            raise RendezvousGracefulExitError("this machine goes away")
        before, failed, ours = self._round, self.failed, self.ours
        self.failed, self.ours = None, False
        info = super().next_rendezvous()
        self._round = frozenset(self._state_holder.state.participants)
        if failed is not None and not ours and self._round == before:
            raise ProgramFailed(_exit_text(*failed), failed[1])
        return info

    def num_nodes_waiting(self) -> int:
        """Machines that want to join, or that are lost: for either the ranks are started again."""
        waiting = super().num_nodes_waiting()
        return waiting + len(self.lost())

    def lost(self) -> frozenset[Any]:
        """The machines of this round that send no heartbeats any more, or have left."""
        participants = self._state_holder.state.participants
        return self._round - frozenset(participants) if self._this_node in participants else frozenset()

    def leave(self) -> None:
        """Take this machine out, so that the others need not miss its heartbeats first. Never closes the rendezvous."""
        if self.left:
            return
        self.left = True
        self._stop_heartbeats()
        try:
            self._op_executor.run(_RendezvousExitOp(), self._get_deadline(timedelta(seconds=LEAVE_SECONDS_MAX)))
        except RendezvousError:
            return  # its host is gone: there is no rendezvous to leave


class NodeAgent(LocalElasticAgent):
    """The ranks of this machine."""

    def __init__(self, rendezvous: Rendezvous, **options: Any) -> None:
        super().__init__(**options)
        self._rendezvous_here = rendezvous

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED and result.failures:
            first = min(result.failures.values(), key=lambda failure: failure.timestamp)
            rank = min(rank for rank, failure in result.failures.items() if failure is first)
            self._rendezvous_here.failed = rank, first.exitcode
            if first.exitcode != contract.EXIT_SAVED_AND_STOPPED:
                _say(f"{_exit_text(rank, first.exitcode)}; meeting the other machines again")
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Told by SIGTERM, they save at a step that all agree on; a rank that waits for a lost one cannot."""
        rendezvous = self._rendezvous_here
        if worker_group.state == WorkerState.HEALTHY and rendezvous.failed is None:
            rendezvous.ours = True
            lost = rendezvous.lost()
            cause = f"{len(lost)} machine(s) of this world are gone" if lost else "another machine joins"
            _say(f"{cause}: the ranks save where they can, and start again")
            if self._pcontext is not None:
                self._pcontext.close(signal.SIGTERM, LOST_SECONDS_MAX if lost else JOINED_SECONDS_MAX)
        super()._stop_workers(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        size = worker_group.workers[0].world_size
        local = worker_group.spec.local_world_size
        world = World(worker_group.workers[0].global_rank, size, 0, local, worker_group.group_world_size or 0)
        _say(f"{world.describe(_has_gpus())}, machine {worker_group.group_rank} of {worker_group.group_world_size}")
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started


def main(arguments: Sequence[str]) -> int:
    """0 if all ranks of this machine are done; 75: saved and stopped for a notice; `EXIT_RANKS_LOST`: the rendezvous
    is gone, or no machines are left for it; 1: the program failed."""
    options = torchrun.parse_args(list(arguments))  # type: ignore[no-untyped-call]
    config, entrypoint, entry_arguments = torchrun.config_from_args(options)
    # A world's first rank gets a new address each round: torch 2.13 keeps that of a machine that is gone.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    parameters = RendezvousParameters(
        backend=config.rdzv_backend, endpoint=config.rdzv_endpoint, run_id=config.run_id, min_nodes=config.min_nodes,
        max_nodes=config.max_nodes, local_addr=config.local_addr, **config.rdzv_configs,
    )  # fmt: skip
    try:
        rendezvous = _rendezvous(parameters)
    except RendezvousError as fault:
        return _lost(f"the rendezvous at {config.rdzv_endpoint} cannot be reached: {_cause(fault)}")
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=tuple(entry_arguments),
        rdzv_handler=rendezvous,
        max_restarts=RESTARTS_MAX,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
    )
    agent = NodeAgent(
        rendezvous, spec=spec, logs_specs=config.logs_specs, start_method=config.start_method,
        exit_barrier_timeout=EXIT_BARRIER_SECONDS,
    )  # fmt: skip
    try:
        return _run(agent, rendezvous, parameters)
    finally:
        rendezvous.leave()


def _run(agent: NodeAgent, rendezvous: Rendezvous, parameters: RendezvousParameters) -> int:
    try:
        result = agent.run()
    except ProgramFailed as fault:
        if fault.ended_with == contract.EXIT_SAVED_AND_STOPPED:
            return contract.EXIT_SAVED_AND_STOPPED
        _say(f"error: {fault.message}; all machines of this world are there: the program failed")
        return 1
    except SignalException:
        return contract.EXIT_SAVED_AND_STOPPED if _notice() else 1
    except RendezvousTimeoutError:
        return _lost(f"fewer than {parameters.min_nodes} machines met in time")
    except RendezvousClosedError:
        return _lost("the other machines have ended this rendezvous")
    except (RendezvousError, RuntimeError, TimeoutError, ConnectionError) as fault:  # torch's DistError is the second
        return _lost(f"the rendezvous at {parameters.endpoint} is gone: {_cause(fault)}")
    if result is None:
        return contract.EXIT_SAVED_AND_STOPPED
    if parameters.get_as_bool("is_host"):
        time.sleep(1.0)  # the others read the end of the barrier from our store
    return contract.EXIT_DONE


def _rendezvous(parameters: RendezvousParameters) -> Rendezvous:
    backend, store = create_backend(parameters)
    limits = RendezvousTimeout(*(_configured(parameters, name) for name in ("join", "last_call", "close", "heartbeat")))
    names = inspect.signature(Rendezvous.from_backend).parameters  # torch before 2.6 has no say in its heartbeats
    alive = {name: parameters.get_as_int(name) for name in ("keep_alive_interval", "keep_alive_max_attempt")}
    options: dict[str, Any] = {name: value for name, value in alive.items() if value and name in names}
    rendezvous: Rendezvous = Rendezvous.from_backend(
        parameters.run_id,
        store,
        backend,
        parameters.min_nodes,
        parameters.max_nodes,
        parameters.local_addr,
        limits,
        **options,
    )
    return rendezvous


def _configured(parameters: RendezvousParameters, name: str) -> timedelta | None:
    seconds = parameters.get_as_int(f"{name}_timeout")
    return None if seconds is None else timedelta(seconds=seconds)


def _notice() -> bool:
    """This machine is going away: the agent has said so to the trainer."""
    path = os.environ.get(contract.NOTICE_FILE)
    return bool(path) and Path(str(path)).exists()


def _has_gpus() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _exit_text(rank: int, exit_code: int) -> str:
    return f"rank {rank} ended with " + (f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}")


def _cause(fault: BaseException) -> str:
    inner = fault.__cause__ or fault
    lines = str(inner).strip().splitlines()
    return lines[0][:200] if lines else type(inner).__name__


def _lost(cause: str) -> int:
    _say(f"{cause}; the agent looks for the other machines")
    return contract.EXIT_RANKS_LOST


def _say(text: str) -> None:
    print(f"ranks: {text}", file=sys.stderr, flush=True)
