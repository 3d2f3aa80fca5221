"""The content of a sweep's page: each run's metric, curve and parameters, read (IO) and put together (pure).

`report_page` draws it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.names import LAYOUT, Phase
from spotheal.fleet.report.series import Series, finite, json_lines, series_of, thinned
from spotheal.fleet.run.runs import Run
from spotheal.fleet.run.store_documents import sensible
from spotheal.fleet.sweep import progress

POINTS_MAX = 240  # of one run's curve
PARAMETERS_MAX = 12  # drawn
VALUES_MAX = 12  # of a parameter whose values are no numbers
_READERS = 16
_LOWER = re.compile(r"loss|perplexity|error|(^|_)(nll|mse|mae|rmse|bce|ce|kl|ppl|seconds|time)($|_)", re.IGNORECASE)
_SCORE = re.compile(r"acc|f1|auc|precision|recall|iou|bleu|rouge|dice|(^|_)m?ap($|_)|score|reward", re.IGNORECASE)


@dataclass(frozen=True)
class Parameter:
    """A parameter that differs between runs. `values`: run -> value, if the run has it; numbers if `numeric`."""

    name: str
    numeric: bool
    values: Mapping[int, Any]

    @property
    def kinds(self) -> list[Any]:
        """Its different values: numbers by size, others as often as they are there."""
        values = list(self.values.values())
        if self.numeric:
            return sorted(set(values))
        return sorted(dict.fromkeys(values), key=lambda value: -values.count(value))


@dataclass(frozen=True)
class SweepReport:
    """`rows`: the summary's, the best first. `values`: run -> the metric. `curve`: the metric of all `curves`."""

    job: str
    run: str
    store: str
    phase: str
    reason: str
    created: datetime
    metric: str
    smallest: bool
    count: Mapping[str, int]
    rows: Sequence[Mapping[str, Any]]
    values: Mapping[int, float]
    curve: str
    curves: Mapping[int, Series]
    parameters: Sequence[Parameter]
    constants: Mapping[str, Any]  # parameters that every run has alike

    @property
    def ended(self) -> bool:
        return self.phase in {phase.value for phase in Phase if phase.is_end}

    @property
    def best(self) -> Mapping[str, Any] | None:
        return self.rows[0] if self.rows and int(self.rows[0]["index"]) in self.values else None


# ------------------------------------------------------------------------------------------------------------- reading
@sensible
def gather(run: Run, entries: Sequence[int]) -> dict[int, dict[str, Series]]:
    """The curves of `entries`, run -> name -> series: of the metrics file, else of the samples of each instance."""

    def of_entry(index: int) -> dict[str, Series]:
        store = Store(run.store.client, run.store.url.below(LAYOUT.entry(index)))
        body = store.get_bytes(LAYOUT.metrics)
        if body is None:
            keys = [key for key in store.keys(LAYOUT.progress("").removesuffix(".jsonl")) if key.endswith(".jsonl")]
            body = b"".join(store.get_bytes(key) or b"" for key in keys)
        curves = series_of(json_lines(body.decode(errors="replace")))
        return {name: Series(name, tuple(thinned(line.points, POINTS_MAX))) for name, line in curves.items()}

    with ThreadPoolExecutor(_READERS) as pool:
        return dict(zip(entries, pool.map(of_entry, entries), strict=True))


# ---------------------------------------------------------------------------------------------------------------- pure
def fill_in(rows: Sequence[dict[str, Any]], curves: Mapping[int, Mapping[str, Series]]) -> None:
    """Rows whose progress tells no figures get the last values of their curves: a trainer may write metrics alone."""
    for row in rows:
        if row["metrics"] or row["loss"] is not None:
            continue
        last = {name: line.points[-1][1] for name, line in curves.get(int(row["index"]), {}).items() if line.points}
        row["loss"], row["metrics"] = last.pop("loss", None), last


def metrics_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every metric that a run has written, the most useful first: the best score, then scores, then losses."""
    metrics = {name for row in rows for name in row["metrics"]}
    metrics |= {"loss"} if any(finite(row["loss"]) is not None for row in rows) else set()

    def rank(name: str) -> tuple[int, str]:
        score = bool(_SCORE.search(name)) and not _LOWER.search(name)
        best, validated = name.startswith("best_"), "val" in name or "test" in name
        order = [score and best, score and validated, best and not score, score, validated, name == "loss", True]
        return order.index(True), name

    return sorted(metrics, key=rank)


def is_lower_better(metric: str) -> bool:
    return bool(_LOWER.search(metric)) and not _SCORE.search(metric)


def curve_of(metric: str, by_run: Mapping[int, Mapping[str, Series]]) -> str:
    """The curve that shows how `metric` developed; "" if no run has one."""
    names = {name for curves in by_run.values() for name in curves}
    plain = metric.removeprefix("best_")
    candidates = [metric, plain, *(("val_loss", "train_loss", "loss") if is_lower_better(metric) else ())]
    return next((name for name in candidates if name in names), next(iter(sorted(names & {"val_loss", "loss"})), ""))


def parameters_of(entries: Sequence[Mapping[str, Any]]) -> tuple[list[Parameter], dict[str, Any]]:
    """Parameters that differ, and parameters that are the same in every entry."""
    parameters: list[Parameter] = []
    constant: dict[str, Any] = {}
    for name in dict.fromkeys(name for entry in entries for name in entry):
        having = {index: entry[name] for index, entry in enumerate(entries) if name in entry}
        texts = {index: progress.in_words(value) for index, value in having.items()}
        if len(set(texts.values())) == 1 and len(having) == len(entries):
            constant[name] = next(iter(having.values()))
            continue
        numbers = {index: number for index, value in having.items() if (number := finite(value)) is not None}
        numeric = len(numbers) == len(having) and len(set(numbers.values())) > 2
        parameters.append(Parameter(name, numeric, numbers if numeric else texts))
    return parameters, constant


@sensible
def make(
    document: Mapping[str, Any], by_run: Mapping[int, Mapping[str, Series]], metric: str, smallest: bool, now: datetime
) -> SweepReport:
    """`document` as `progress.summarise` gives it; ConfigError if no run has written `metric`."""
    rows = progress.by_metric(list(document["entries"]), metric, smallest=smallest)
    curve = curve_of(metric, by_run)
    differing, constant = parameters_of([row["parameters"] for row in document["entries"]])
    values = {int(row["index"]): progress.value_of(row, metric) for row in rows}
    return SweepReport(
        job=document["job"], run=document["run"], store=document["store"], phase=str(document["phase"]),
        reason=str(document["reason"]), created=now, metric=metric, smallest=smallest, count=document["runs"],
        rows=rows, values={index: value for index, value in values.items() if value is not None},
        curve=curve, curves={index: curves[curve] for index, curves in by_run.items() if curve in curves},
        parameters=differing, constants=constant,
    )  # fmt: skip
