"""The charts of a sweep's page as SVG, for one width in pixels. Pure. The best runs have colours, the others are grey.

Every mark leads to its run's row in the table and shows its values under the pointer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spotheal.fleet.report.charts import below, grid, safe, svg, text
from spotheal.fleet.report.series import Axis, Series, axis_of, brief, pieces
from spotheal.fleet.run.table import cut
from spotheal.fleet.sweep.report import VALUES_MAX, Parameter, SweepReport

COLOURED = 4
_POINTS_ALL = 9000  # of all lines of a chart together
_LETTER = 6.6
_SHARE = re.compile(r"acc|f1|auc|precision|recall|iou|dice|(^|_)m?ap($|_)", re.IGNORECASE)


@dataclass(frozen=True)
class Look:
    """How a run is drawn: `cls` of its colour, and its tooltip."""

    index: int
    cls: str
    says: str


def looks(report: SweepReport) -> dict[int, Look]:
    """Of every run, the best last, so that they are drawn above the others."""
    names = [parameter.name for parameter in report.parameters]
    by_index = {}
    for place, row in reversed(list(enumerate(report.rows))):
        index = int(row["index"])
        value = report.values.get(index)
        settings = ", ".join(f"{name}={row['parameters'].get(name)}" for name in names[:6] if name in row["parameters"])
        result = "" if value is None else f", {report.metric} {brief(value)}"
        cls = f"s{place}" if place < COLOURED and value is not None else "rest"
        by_index[index] = Look(index, cls, f"run {index}: {settings}{result}")
    return by_index


def curves(report: SweepReport, width: int, height: int = 300) -> str:
    """The learning curves of all runs."""
    left, right, top, bottom = 52, 12, 12, 40
    lines = report.curves
    values = axis_of(value for series in lines.values() for _, value in series.points)
    xs = [x for series in lines.values() for x, _ in series.points]
    across = _wide(Axis(min(xs, default=0.0), max(xs, default=1.0)))
    percent = is_share(report.curve, (value for series in lines.values() for _, value in series.points))

    def px(x: float) -> float:
        return left + across.share(x) * (width - left - right)

    def py(y: float) -> float:
        return top + (1 - values.share(y)) * (height - top - bottom)

    parts = [grid(values, py, left, width - right, percent)]
    parts.append(below(across, px, height - bottom, width, "step", whole=True))
    points_max = max(24, min(240, _POINTS_ALL // max(1, len(lines))))
    for look in looks(report).values():
        if look.index in lines:
            drawn = pieces(Series("", lines[look.index].points), points_max)
            parts.append(_linked(look, _path([(px(x), py(y)) for x, y in drawn[0]], look.cls)))
            x, y = lines[look.index].points[-1]
            if look.cls != "rest":
                parts.append(f'<circle class="dot {look.cls}" cx="{px(x):.1f}" cy="{py(y):.1f}" r="3"/>')
    summary = f"{report.curve} over the steps of {len(lines)} runs; the table of runs has their last values."
    return svg("curves", width, height, f"Learning curves: {report.curve}", summary, parts)


def scatter(report: SweepReport, parameter: Parameter, number: int, width: int, height: int = 240) -> str:
    """The metric over a parameter that is a number."""
    left, right, top, bottom = 52, 14, 12, 40
    having = {index: float(x) for index, x in parameter.values.items() if index in report.values}
    across, values = _wide(axis_of(having.values())), axis_of(report.values[index] for index in having)

    def px(x: float) -> float:
        return left + across.share(x) * (width - left - right)

    def py(y: float) -> float:
        return top + (1 - values.share(y)) * (height - top - bottom)

    parts = [grid(values, py, left, width - right, is_share(report.metric, report.values.values()))]
    parts.append(below(across, px, height - bottom, width, cut(parameter.name, width / 9)))
    for look in looks(report).values():
        if look.index in having:
            parts.append(_dot(look, px(having[look.index]), py(report.values[look.index])))
    summary = f"{report.metric} of {len(having)} runs, each at its {parameter.name}."
    return svg(f"of-{number}", width, height, f"{report.metric} and {parameter.name}", summary, parts)


def strips(report: SweepReport, parameter: Parameter, number: int, width: int) -> str:
    """The metric of the runs with each value of a parameter that is no number: a line for each value."""
    left, right, lane, head = 10, 14, 22, 20
    having = {index: str(value) for index, value in parameter.values.items() if index in report.values}
    kinds = [value for value in parameter.kinds if value in having.values()][:VALUES_MAX]
    across = _wide(axis_of(report.values[index] for index in having))

    def px(x: float) -> float:
        return left + across.share(x) * (width - left - right)

    tops = {value: place * (lane + head) for place, value in enumerate(kinds)}
    parts = []
    for value, top in tops.items():
        parts.append(text(left, top + 13, cut(value, (width - left - right) / 7.5), cls="zone"))
        middle = top + head + lane / 2
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{middle:.1f}" y2="{middle:.1f}"/>')
    for look in looks(report).values():
        if (value := having.get(look.index)) in tops:
            aside = (look.index * 7 % 11 - 5) * 0.9  # so that equal ones do not hide each other
            parts.append(_dot(look, px(report.values[look.index]), tops[value] + head + lane / 2 + aside))
    foot = len(kinds) * (lane + head) + 6
    parts.append(below(across, px, foot, width, cut(report.metric, width / 9)))
    summary = f"{report.metric} of {len(having)} runs, a line for each value of {parameter.name}."
    return svg(f"of-{number}", width, int(foot + 40), f"{report.metric} and {parameter.name}", summary, parts)


def parallel(report: SweepReport, width: int, height: int = 320) -> str:
    """Each run a line across its parameters to the metric; as many parameters as there is room for."""
    parameters = list(report.parameters)[: max(1, width // 120 - 1)]
    top, bottom = 44, 26
    columns = [_Column.of(parameter) for parameter in parameters]
    columns.append(_Column(report.metric, _tight(list(report.values.values())), (), dict(report.values)))
    room = width / len(columns)
    parts = []

    def px(place: int) -> float:
        return room * (place + 0.5)

    def py(share: float) -> float:
        return top + (1 - share) * (height - top - bottom)

    for place, column in enumerate(columns):
        x = f"{px(place):.1f}"
        parts.append(f'<line class="axis" x1="{x}" x2="{x}" y1="{top}" y2="{height - bottom}"/>')
        parts.append(text(px(place), 14, cut(column.name, room / 7.2), cls="bar-name", anchor="middle"))
        for share, label in column.ends():
            at = py(share) + (-9 if share == 1 else 17)
            parts.append(text(px(place), at, cut(label, room / 7), anchor="middle"))
    for look in looks(report).values():
        shares = [(px(place), column.share(look.index)) for place, column in enumerate(columns)]
        points = [(x, py(share)) for x, share in shares if share is not None]
        if look.index in report.values and len(points) > 1:
            parts.append(_linked(look, _path(points, look.cls)))
    left_out = len(report.parameters) - len(parameters)
    note = f" {left_out} parameters more are not drawn at this width." if left_out else ""
    summary = f"Each line is one of {len(report.values)} runs, from its parameters to its {report.metric}.{note}"
    return svg("parallel", width, height, "Parameters and metric", summary, parts)


@dataclass(frozen=True)
class _Column:
    """An axis of the parallel chart: of numbers, or of `kinds` in order."""

    name: str
    axis: Axis
    kinds: tuple[Any, ...]
    values: dict[int, Any]

    @classmethod
    def of(cls, parameter: Parameter) -> _Column:
        kinds = () if parameter.numeric else tuple(parameter.kinds)
        axis = _tight([float(value) for value in parameter.values.values()]) if parameter.numeric else Axis(0.0, 1.0)
        return cls(parameter.name, axis, kinds, dict(parameter.values))

    def share(self, index: int) -> float | None:
        if index not in self.values:
            return None
        if not self.kinds:
            return self.axis.share(float(self.values[index]))
        return self.kinds.index(self.values[index]) / max(1, len(self.kinds) - 1)

    def ends(self) -> list[tuple[float, str]]:
        if not self.kinds:
            return [(0.0, brief(self.axis.low)), (1.0, brief(self.axis.high))]
        return [(0.0, str(self.kinds[0])), (1.0, str(self.kinds[-1]))][: len(self.kinds)]


# ----------------------------------------------------------------------------------------------------------- the pieces
def is_share(name: str, values: Iterable[float]) -> bool:
    """Whether they are read best as percent: an accuracy is, a loss or a reward below 1 is not."""
    numbers = list(values)
    return bool(_SHARE.search(name) and numbers) and all(0 <= value <= 1 for value in numbers) and max(numbers) > 0.2


def _wide(axis: Axis) -> Axis:
    return axis if axis.high > axis.low else replace(axis, low=axis.low - 0.5, high=axis.high + 0.5)


def _tight(values: Sequence[float]) -> Axis:
    """From the least value to the greatest, with their figures at its ends; a single outlier is left out."""
    axis = axis_of(values)
    if axis.log or max(values) <= min(values):
        return axis
    return replace(axis, low=max(axis.low, min(values)), high=min(axis.high, max(values)))


def _path(points: Sequence[tuple[float, float]], cls: str) -> str:
    first, *rest = points
    way = f"M{first[0]:.1f} {first[1]:.1f}" + "".join(f"L{x:.1f} {y:.1f}" for x, y in rest)
    return f'<path class="line {cls}" d="{way}"/>'


def _dot(look: Look, x: float, y: float) -> str:
    radius = 3 if look.cls == "rest" else 5
    return _linked(look, f'<circle class="dot {look.cls}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>')


def _linked(look: Look, drawn: str) -> str:
    return f'<a href="#run-{look.index}" tabindex="-1"><title>{safe(look.says)}</title>{drawn}</a>'
