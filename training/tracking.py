"""One run in MLflow and in Weights & Biases over all attempts of a training, with no step in it twice.

    run = mlflow_run()                      # in the place of mlflow.start_run()
    new = next_step(run)                    # of an MLflow run, or of the run that wandb.init returned
    if step >= new: mlflow.log_metric("loss", loss, step=step)

Neither library is imported before it is used. W&B needs no `mlflow_run` of its own: the agent sets WANDB_RUN_ID.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spotheal.agent.protocol import contract

MLFLOW_TAG = "spotheal.run"


def mlflow_run(**options: Any) -> Any:
    """`mlflow.start_run(**options)`; a later attempt resumes the run that the first one made, found by its tag.

    The agent cannot do so with MLFLOW_RUN_ID: start_run fails if that names a run that the tracking server does not
    have (mlflow 3.17, tracking/fluent.py), and only the trainer may ask the server. The search is in the active
    experiment: call mlflow.set_experiment first. Your own MLFLOW_RUN_ID or `run_id` wins. On one rank only.
    """
    import mlflow

    of_agent = os.environ.get(contract.RUN)
    if not of_agent or os.environ.get("MLFLOW_RUN_ID") or options.get("run_id"):
        return mlflow.start_run(**options)
    query = f"tags.`{MLFLOW_TAG}` = '{of_agent}'"
    earlier = mlflow.search_runs(filter_string=query, max_results=1, output_format="list")
    if earlier:
        return mlflow.start_run(**options | {"run_id": earlier[0].info.run_id})
    return mlflow.start_run(**options | {"tags": {**(options.get("tags") or {}), MLFLOW_TAG: of_agent}})


def next_step(run: Any) -> int:
    """The first step that `run` does not have: those before it were logged by an attempt that was killed after them.

    `run` is MLflow's, or W&B's. 0 for a run that has no step.
    """
    if hasattr(run, "starting_step"):
        return max([int(run.starting_step), *(step + 1 for step in _wandb_steps(Path(run.dir).parent.parent, run.id))])
    import mlflow

    client, run_id = mlflow.MlflowClient(), run.info.run_id
    names = [name for name in client.get_run(run_id).data.metrics if not name.startswith("system/")]
    steps = (int(metric.step) for name in names for metric in client.get_metric_history(run_id, name))
    return max(steps, default=-1) + 1


def _wandb_steps(folder: Path, run_id: str) -> Iterator[int]:
    """Steps in the offline folders of that id: without a server W&B itself looks at none of them."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    for log in folder.glob(f"offline-run-*/run-{run_id}.wandb"):
        for text in _records(log.read_bytes()):
            try:
                record = Record.FromString(text)
            except DecodeError:  # the last blocks before a machine died, or of a log that is being written
                break
            if record.WhichOneof("record_type") == "history":
                yield int(record.history.step.num)


_FILE_HEADER, _BLOCK, _HEADER = 7, 32768, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def _records(log: bytes) -> Iterator[bytes]:
    """The whole records of a LevelDB log, up to one that a kill has cut off. A header is a checksum of 4 bytes, the
    length in 2, and the kind; none begins in the last 6 bytes of a block (LevelDB, doc/log_format.md)."""
    place, record = _FILE_HEADER, b""
    while place + _HEADER <= len(log):
        if _BLOCK - place % _BLOCK < _HEADER:
            place += _BLOCK - place % _BLOCK
            continue
        length, kind = int.from_bytes(log[place + 4 : place + 6], "little"), log[place + 6]
        part = log[place + _HEADER : place + _HEADER + length]
        if len(part) < length or not _FULL <= kind <= _LAST:
            return
        place += _HEADER + length
        record = part if kind in (_FULL, _FIRST) else record + part
        if kind in (_FULL, _LAST):
            yield record
