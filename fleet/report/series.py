"""Curves of a report: JSON lines of a trainer, read as they come, thinned for drawing. Pure.

A trainer may write anything: lines that are no JSON object, NaN, infinities, 1e300, names with markup. What is not a
finite number at a whole step is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any, TypeGuard

from spotheal.agent.money.bill_inputs import moment_of
from spotheal.agent.protocol.bounded_json import parse_object

POINTS_MAX = 500  # of a drawn line
SERIES_MAX = 5  # lines in one chart
OTHERS_MAX = 8  # charts of other figures than loss and accuracy
_NAME_MAX = 40
_BESIDE = {"step", "epoch", "closes", "time", "saved"}
_LOSS = re.compile(r"loss|perplexity|(^|_)(nll|mse|mae|rmse|bce|ce|kl|ppl)($|_)", re.IGNORECASE)
_SCORE = re.compile(r"acc|f1|auc|precision|recall|iou|bleu|rouge|dice|(^|_)m?ap($|_)|top_?\d|score|reward", re.I)


@dataclass(frozen=True)
class Series:
    """`points`: (x, value), by x. `gaps`: each x at which the line begins again."""

    name: str
    points: tuple[tuple[float, float], ...]
    gaps: frozenset[float] = frozenset()


@dataclass(frozen=True)
class Sample:
    """How far a trainer was, and when; figures that it did not give are None."""

    instance: str
    time: datetime
    step: int
    saved: int | None = None
    save_seconds: float | None = None
    stall_seconds: float | None = None


def json_lines(text: str) -> Iterable[Mapping[str, Any]]:
    for line in text.splitlines():
        try:
            yield parse_object(line)
        except ValueError:
            continue


def series_of(lines: Iterable[Mapping[str, Any]]) -> dict[str, Series]:
    """Every figure of the metrics lines, by name, over the steps; of a step that is there twice the last counts."""
    by_name: dict[str, dict[int, float]] = {}
    for line in lines:
        step = line.get("step")
        if not is_whole(step) or not 0 <= step < 1 << 53:
            continue
        for name, value in line.items():
            if name not in _BESIDE and (number := finite(value)) is not None:
                by_name.setdefault(name[:_NAME_MAX], {})[step] = number
    return {name: Series(name, tuple(sorted(points.items()))) for name, points in by_name.items()}


def losses(curves: Mapping[str, Series]) -> list[Series]:
    return _chosen(curves, _LOSS)


def scores(curves: Mapping[str, Series]) -> list[Series]:
    return _chosen({name: curve for name, curve in curves.items() if not _LOSS.search(name)}, _SCORE)


def other_series(curves: Mapping[str, Series]) -> list[Series]:
    """Series that are neither loss nor score, by name: each has its own scale."""
    names = [name for name in sorted(curves) if not _LOSS.search(name) and not _SCORE.search(name)]
    return [curves[name] for name in names[:OTHERS_MAX]]


def _chosen(curves: Mapping[str, Series], pattern: re.Pattern[str]) -> list[Series]:
    """Series that match the pattern: validation first, the one with most points last (drawn below the others)."""
    named = [curve for name, curve in curves.items() if pattern.search(name)]
    return sorted(named, key=lambda curve: ("val" not in curve.name, len(curve.points), curve.name))[:SERIES_MAX]


def samples_of(instance: str, text: str) -> list[Sample]:
    samples = []
    for line in json_lines(text):
        moment, step = moment_of(line.get("time")), line.get("step")
        if moment is None or not is_whole(step):
            continue
        saved = line.get("saved")
        samples.append(Sample(
            instance, moment, step, saved if is_whole(saved) else None,
            finite(line.get("save_seconds")), finite(line.get("stall_seconds")),
        ))  # fmt: skip
    return sorted(samples, key=lambda sample: (sample.time, sample.step))


def pieces(series: Series, count: int = POINTS_MAX) -> list[list[tuple[float, float]]]:
    """Its unbroken lines, thinned to about `count` points together."""
    cuts = [index for index, (x, _) in enumerate(series.points) if x in series.gaps and index]
    parts = [series.points[first:last] for first, last in pairwise([0, *cuts, len(series.points)])]
    share = count / max(1, len(series.points))
    return [thinned(piece, max(4, int(share * len(piece)))) for piece in parts if piece]


def thinned(points: Sequence[tuple[float, float]], count: int = POINTS_MAX) -> list[tuple[float, float]]:
    """At most `count` points of the same shape: of each stretch the lowest and the highest, so that spikes stay."""
    if len(points) <= count:
        return list(points)
    stretches = max(1, count // 2 - 1)
    kept_points = [points[0]]
    inner = points[1:-1]
    for index in range(stretches):
        stretch = inner[index * len(inner) // stretches : (index + 1) * len(inner) // stretches]
        if stretch:
            ends = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
            kept_points += sorted(ends)
    return [*kept_points, points[-1]]


def finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


# ---------------------------------------------------------------------------------------------------------------- axes
@dataclass(frozen=True)
class Axis:
    """From `low` to `high`; `log` in powers of ten. Values beyond are drawn at the edge."""

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """0 at `low`, 1 at `high`."""
        if self.log:
            low, high = math.log10(self.low), math.log10(self.high)
            value = math.log10(value) if value > 0 else low
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def ticks(self, count: int = 5) -> list[float]:
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            stride = max(1, -(-(last - first + 1) // count))
            return [10.0**power for power in range(first, last + 1, stride)]
        step = nice((self.high - self.low) / max(1, count))
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)][: 2 * count]


def axis_of(values: Iterable[float]) -> Axis:
    """An axis for the bulk of `values`: a single wild one must not flatten the curve."""
    ordered = sorted(min(1e30, max(-1e30, value)) if abs(value) > 1e-30 else 0.0 for value in values)
    if not ordered:
        return Axis(0.0, 1.0)
    cut = len(ordered) // 200
    low, high = ordered[cut], ordered[len(ordered) - 1 - cut]
    if low > 0 and high / low > 200:
        low = max(low, high * 1e-9)
        return Axis(10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high)), log=True)
    margin = (high - low) * 0.06
    if margin <= abs(high) * 1e-9:
        margin = abs(high) * 0.1 or 0.5
    floor = 0.0 if 0 <= low < (high - low) * 0.3 else low - margin
    return Axis(floor, high + margin)


def nice(step: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    if step <= 0 or not math.isfinite(step):
        return 1.0
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def brief(value: float) -> str:
    """`0.031`, `1.25`, `12k`, `3M`, `1e+30`."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e12 or size < 1e-4:
        return f"{value:.0e}"
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= scale:
            return f"{value / scale:.3g}{suffix}"
    return f"{value:.4g}"
