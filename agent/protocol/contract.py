"""The contract between the agent and any trainer: environment, files, exit codes. Standard library only.

A trainer needs nothing of ours to keep it; `spotheal.training` keeps it for those who want it kept for them.
docs/contract.md says the same in prose.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from spotheal.agent.protocol import bounded_json
from spotheal.agent.protocol.clock import parse_rfc3339, rfc3339

# Environment of the trainer. All folders exist when it starts.
JOB = "SPOTHEAL_JOB"
RUN = "SPOTHEAL_RUN"
DATASETS_DIR = "SPOTHEAL_DATASETS_DIR"
CHECKPOINT_DIR = "SPOTHEAL_CHECKPOINT_DIR"
RESULTS_DIR = "SPOTHEAL_RESULTS_DIR"
LOG_DIR = "SPOTHEAL_LOG_DIR"
ATTEMPT = "SPOTHEAL_ATTEMPT"  # 1 on the first start of the run, then counted over all instances
INDEX = "SPOTHEAL_INDEX"
BATCH_INDEX = "AWS_BATCH_JOB_ARRAY_INDEX"
BETWEEN_INTERRUPTIONS = "SPOTHEAL_SECONDS_BETWEEN_INTERRUPTIONS"  # as this run has met them so far
PARAMS_FILE = "SPOTHEAL_PARAMS_FILE"  # of a run of a sweep: its entry of the list, as JSON
NOTICE_FILE = "SPOTHEAL_NOTICE_FILE"
REBALANCE_FILE = "SPOTHEAL_REBALANCE_FILE"
PROGRESS_FILE = "SPOTHEAL_PROGRESS_FILE"
METRICS_FILE = "SPOTHEAL_METRICS_FILE"

EXIT_DONE = 0
EXIT_SAVED_AND_STOPPED = 75  # EX_TEMPFAIL of sysexits.h
EXIT_RANKS_LOST = 76  # of our launcher on several machines: the others are gone; no fault of the program

ACTIONS = ("terminate", "stop", "hibernate", "shutdown")


@dataclass(frozen=True)
class Notice:
    """This machine is going away. `deadline`: the moment by which the trainer must have ended, UTC."""

    action: str
    deadline: datetime
    kind: str = "interruption"

    def to_json(self) -> str:
        return json.dumps({"kind": self.kind, "action": self.action, "deadline": rfc3339(self.deadline)})

    @classmethod
    def from_json(cls, text: str) -> Notice:
        """ValueError where `text` is not a notice."""
        body = bounded_json.parse(text)
        if not isinstance(body, dict) or body.get("action") not in ACTIONS:
            raise ValueError(f"not a notice: {text[:80]!r}")
        return cls(str(body["action"]), parse_rfc3339(str(body.get("deadline"))), str(body.get("kind", "interruption")))


@dataclass(frozen=True)
class Saved:
    """The last checkpoint that is durable; written only after fsync."""

    step: int
    path: str
    time: str  # RFC 3339


@dataclass(frozen=True)
class Progress:
    """SPOTHEAL_PROGRESS_FILE: replaced by rename, so it is always whole.

    `step` is the global step last completed; `steps_total` the last step of the run, where it is known.
    """

    step: int
    epoch: int | None = None
    loss: float | None = None
    steps_total: int | None = None
    samples_per_second: float | None = None
    saved: Saved | None = None
    extra: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        body: dict[str, object] = {"step": self.step, "epoch": self.epoch, "loss": _finite(self.loss)}
        body |= {"steps_total": self.steps_total, "samples_per_second": _finite(self.samples_per_second)}
        body |= {name: _finite(value) for name, value in self.extra.items()}
        body["saved"] = None if self.saved is None else vars(self.saved)
        return json.dumps(body)

    @classmethod
    def from_json(cls, text: str) -> Progress:
        """ValueError where `text` is no progress document; unknown keys go to `extra` where they are numbers.

        Numbers that are not finite count as not written: JSON has none, and what is read here is stored as JSON again.
        """
        body = bounded_json.parse(text)
        if not isinstance(body, dict) or not _is_int(body.get("step")):
            raise ValueError("a progress file is a JSON object with at least an integer `step`")
        saved = body.get("saved")
        if saved is not None:
            if not isinstance(saved, dict) or not _is_int(saved.get("step")):
                raise ValueError("`saved` is an object with at least an integer `step`")
            saved = Saved(saved["step"], str(saved.get("path", "")), _time(saved.get("time")))
        names = ("step", "epoch", "loss", "steps_total", "samples_per_second", "saved")
        return cls(
            step=body["step"],
            epoch=body["epoch"] if _is_int(body.get("epoch")) else None,
            loss=_number(body.get("loss")),
            steps_total=body.get("steps_total") if _is_int(body.get("steps_total")) else None,
            samples_per_second=_number(body.get("samples_per_second")),
            saved=saved,
            extra={key: number for key in body if key not in names and (number := _number(body[key])) is not None},
        )


def write_atomically(path: Path, text: str) -> None:
    """Write by rename, so that a reader sees the old text or the new, never a part. Not durable: no fsync."""
    folder, name = os.path.split(path)
    part = os.path.join(folder, f".{name}.{os.getpid()}")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        rest = memoryview(text.encode())
        while rest:
            rest = rest[os.write(fd, rest) :]
    finally:
        os.close(fd)
    os.replace(part, path)


def read_progress(path: Path) -> Progress | None:
    """The progress file, or None where it is absent or unreadable (a trainer's fault is never the agent's)."""
    try:
        return Progress.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def read_notice(path: Path) -> Notice | None:
    """The notice file, or None where it is absent or unreadable."""
    try:
        return Notice.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _time(value: object) -> str:
    """As it was written, "" if it is no time: who reads status.json later reckons with it."""
    try:
        parse_rfc3339(str(value))
    except ValueError:
        return ""
    return str(value)


def _number(value: object) -> float | None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        return _finite(float(value))
    except OverflowError:  # an integer beyond any float
        return None


def _finite(value: float | None) -> float | None:
    """JSON has no NaN; a loss that is one is written as null."""
    return value if value is not None and math.isfinite(value) else None
