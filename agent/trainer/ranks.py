"""How many ranks of the trainer this machine runs, and the command that starts them: torchrun around the job's own.

What is asked (`nproc_per_node`), what the machine has (nvidia-smi) and what the command says for itself must agree:
a GPU that nobody uses, and ranks that do not know of each other, cost as much as training and are not seen in any log.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from spotheal.agent.files import untrusted_folders
from spotheal.agent.processes import programs
from spotheal.agent.processes.launchers import RANKS_MODULE, launches, processes_asked
from spotheal.agent.processes.output import readable
from spotheal.agent.protocol.clock import Stop
from spotheal.agent.protocol.errors import Fatal, Retryable, SetupFailed
from spotheal.agent.protocol.redaction import SECRETS

NVIDIA_SMI_SECONDS_MAX = 60.0  # a driver that has just been loaded initializes every GPU at the first call
_QUERY = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
_TAIL_BYTES = 16 << 10  # of a rank's own output
_NEXT = 'correct `nproc_per_node` in job.toml: a number, or "gpu" for one process a GPU'


@dataclass(frozen=True)
class World:
    """`argv` starts all ranks of this machine. `says` goes to the log; `warns` too, where something looks wrong.

    `logs` is the folder in which torchrun puts the output of all ranks but the first; None without ranks of ours.
    """

    argv: tuple[str, ...]
    says: str = ""
    warns: str = ""
    logs: Path | None = None
    gpus: int = 0  # that the trainer is to use


class Rendezvous(Protocol):
    """Where the machines of a run meet."""

    def options(self) -> list[str]:
        """torchrun's."""
        ...


class Meeting(Protocol):
    """How a supervisor's trainer meets those of other machines. `leads`: this machine speaks for the run."""

    @property
    def leads(self) -> bool: ...

    def meet(self, stop: Stop) -> Rendezvous | None: ...


def gpu_count() -> int:
    """The GPUs that nvidia-smi lists; 0 where there is no such program, or no driver it can speak with.

    Retryable where it hangs.
    """
    try:
        answer = programs.run(_QUERY, seconds_max=NVIDIA_SMI_SECONDS_MAX)
    except Retryable:
        raise
    except Fatal:
        return 0
    lines = [line.strip() for line in answer.out.splitlines()]
    return sum(line.isdigit() for line in lines) if answer.code == 0 else 0


def visible(gpus: int, environment: Mapping[str, str]) -> int:
    """How many of `gpus` the job leaves itself with CUDA_VISIBLE_DEVICES."""
    devices = environment.get("CUDA_VISIBLE_DEVICES")
    if devices is None or not gpus:
        return gpus
    named = [word.strip() for word in devices.split(",")]
    return min(gpus, len([word for word in named if word and word != "-1"]))


def world_of(
    asked: int | str,
    command: Sequence[str],
    *,
    gpus: int,
    directory: Path,
    interpreter: Path,
    logs: Path,
    rendezvous: Sequence[str] = (),
) -> World:
    """The world of a job with `nproc_per_node = asked` on a machine with `gpus`. SetupFailed where they do not agree.

    `command` is the job's, ready to be run; `logs` a folder of this attempt's own. `rendezvous`: torchrun's options of
    one with other machines; the launcher says how many they are, each time that one comes or goes.
    """
    argv = tuple(command)
    if launches(argv, directory):
        if rendezvous:
            raise SetupFailed(
                "the command launches its ranks itself, and so knows nothing of the other machines",
                next_step="leave the launcher out of `command`: with `nodes` torchrun is put before it",
            )
        return _launched_by_itself(asked, argv, gpus)
    if asked == 1 and not rendezvous:
        idle = f'{gpus - 1} of {gpus} GPUs may stay idle: nproc_per_node = "gpu" in job.toml starts a rank on each'
        return World(argv, warns=idle if gpus > 1 else "", gpus=gpus)
    count = gpus if asked == "gpu" else int(asked)
    if count == 0:
        raise SetupFailed('nproc_per_node = "gpu", but nvidia-smi shows no GPU on this machine', next_step=_NEXT)
    if gpus and count != gpus:
        consequence = f"{gpus - count} would stay idle" if count < gpus else "two ranks cannot share one"
        raise SetupFailed(
            f"nproc_per_node = {count}, but this machine has {gpus} GPUs: {consequence}",
            next_step=_NEXT + "; CUDA_VISIBLE_DEVICES in [environment] leaves GPUs out on purpose",
        )
    rendezvous_options = rendezvous or ["--standalone"]
    torchrun = [
        str(interpreter),
        "-m",
        RANKS_MODULE,
        *rendezvous_options,
        f"--nproc_per_node={count}",
        "--max_restarts=0",
    ]
    if count > 1:  # both outputs of all ranks but the first go to files
        torchrun += [f"--log_dir={logs}", "--redirects=" + ",".join(f"{rank}:3" for rank in range(1, count))]
    says = "" if rendezvous else describe(count, gpus)
    return World((*torchrun, "--no_python", *argv), says=says, logs=logs, gpus=gpus)


def describe(processes: int, gpus: int) -> str:
    """`world 4 = 1 machine x 4 GPUs`."""
    return f"world {processes} = 1 machine x {_some(processes, 'GPU' if gpus else 'process')}"


def last_words(logs: Path | None, lines_max: int = 15) -> list[str]:
    """The end of what the ranks that were not in the log said, of at most two that failed: why they ended."""
    texts: list[str] = []
    paths = sorted(_ranks_errors(logs)) if logs is not None else []
    tails = [(path.split("/")[-2], _tail(logs, path, lines_max)) for path in paths if logs is not None]
    failed = [tail for tail in tails if any("Error" in line or "error" in line for line in tail[1])]
    for rank, lines in failed[:2]:
        texts += [f"rank {rank} | {line}" for line in lines]
    return texts


def _launched_by_itself(processes: int | str, argv: tuple[str, ...], gpus: int) -> World:
    own_processes = processes_asked(argv)
    number = int(own_processes) if own_processes is not None and own_processes.isdigit() else None
    if processes != 1 and number is not None and number != (gpus if processes == "gpu" else processes):
        raise SetupFailed(
            f"nproc_per_node = {processes!r}, but the command starts {number} processes by itself",
            next_step="leave `nproc_per_node` out, or the launcher out of `command`: then it is added",
        )
    idle = gpus - (number or gpus)
    return World(
        argv,
        gpus=gpus,
        says="the command launches its ranks itself" + (f": {own_processes} on this machine" if own_processes else ""),
        warns=f"{idle} of {gpus} GPUs stay idle: the command starts {number} processes" if idle > 0 else "",
    )


def _ranks_errors(logs: Path) -> Iterator[str]:
    """`*/attempt_*/*/stderr.log`, as torchrun lays them out."""
    for path, _ in untrusted_folders.files(logs):
        parts = path.split("/")
        if len(parts) == 4 and parts[1].startswith("attempt_") and parts[3] == "stderr.log":
            yield path


def _tail(logs: Path, path: str, lines_max: int) -> list[str]:
    """The trainer's own file."""
    try:
        with untrusted_folders.file(logs, path) as descriptor, open(descriptor, "rb", closefd=False) as file:
            start = max(0, os.fstat(descriptor).st_size - _TAIL_BYTES)
            file.seek(start)
            lines = file.read(_TAIL_BYTES).split(b"\n")
    except OSError:
        return []
    # A line whose beginning is not read is left out: half a secret is not known as one.
    whole = [line.strip(b"\r") for line in (lines[1:] if start else lines) if line]
    return list(SECRETS.stream().lines([readable(line) for line in whole]))[-lines_max:]


def _some(count: int, thing: str) -> str:
    plural = thing + ("es" if thing.endswith("s") else "s")
    return f"{count} {thing if count == 1 else plural}"
