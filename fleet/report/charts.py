"""The charts of a report as SVG, drawn for one width in pixels. Pure; every text from outside goes through `safe`.

Colours are classes of the page's style, so that light and dark are the page's to choose.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from itertools import pairwise

from spotheal.agent.protocol.foreign_text import printable
from spotheal.fleet.report.series import Axis, Series, axis_of, brief, pieces
from spotheal.fleet.run.table import cut

_LETTER = 6.6  # widest an 11 px figure or letter of the page's fonts is, nearly
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800,
          1209600, 2592000)  # fmt: skip
_TEXT_MAX = 200


def safe(text: object) -> str:
    """For markup: no control characters, no tags, no endless line."""
    plain = printable(str(text))
    return html.escape(plain if len(plain) <= _TEXT_MAX else plain[: _TEXT_MAX - 1] + "…")


@dataclass(frozen=True)
class Mark:
    """A vertical line: `kind` interruption (AWS took the machine) or resume."""

    x: float
    label: str
    kind: str = "resume"


@dataclass(frozen=True)
class LineChart:
    """`title` and `summary` are read aloud; series are drawn in order, the first on top."""

    id: str
    title: str
    summary: str
    series: Sequence[Series]
    marks: Sequence[Mark] = ()
    x_name: str = "step"
    stairs: frozenset[str] = frozenset()  # names that hold their value until the next point
    times: tuple[datetime, datetime] | None = None  # x is seconds since the first
    y_low: float | None = None
    percent: bool = False


def line_chart(chart: LineChart, width: int, height: int = 260) -> str:
    left, right, top, bottom = 52, 12, 16, 40
    w, h = width - left - right, height - top - bottom
    values = axis_of(value for series in chart.series for _, value in series.points)
    if chart.y_low is not None and not values.log:
        values = replace(values, low=chart.y_low)
    xs = [x for series in chart.series for x, _ in series.points]
    across = Axis(min(xs, default=0.0), max(xs, default=1.0))
    if chart.times is not None:
        across = Axis(0.0, max(1.0, (chart.times[1] - chart.times[0]).total_seconds()))
    if across.high <= across.low:
        across = Axis(across.low - 0.5, across.low + 0.5)

    def px(x: float) -> float:
        return left + across.share(x) * w

    def py(y: float) -> float:
        return top + (1 - values.share(y)) * h

    parts = [grid(values, py, left, width - right, chart.percent)]
    parts.append(_below(chart, across, px, height - bottom, width))
    parts += [_mark(mark, px(mark.x), top, top + h) for mark in chart.marks if across.low <= mark.x <= across.high]
    for number, series in reversed(list(enumerate(chart.series))):
        drawn = [[(px(x), py(y)) for x, y in piece] for piece in pieces(series)]
        parts.append(_line(drawn, number, series.name in chart.stairs, series, chart.percent))
    return svg(chart.id, width, height, chart.title, chart.summary, parts)


def grid(axis: Axis, py: Callable[[float], float], left: int, right: int, percent: bool) -> str:
    parts = []
    for value in axis.ticks(4):
        label = f"{value * 100:.3g} %" if percent else brief(value)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{py(value):.1f}" y2="{py(value):.1f}"/>')
        parts.append(text(left - 8, py(value) + 4, label, anchor="end"))
    return "".join(parts)


def _below(chart: LineChart, axis: Axis, px: Callable[[float], float], y: float, width: int) -> str:
    if chart.times is not None:
        line = f'<line class="axis" x1="{px(axis.low):.1f}" x2="{px(axis.high):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        return line + time_ticks(*chart.times, px, y, width)
    return below(axis, px, y, width, chart.x_name, whole=True)


def below(axis: Axis, px: Callable[[float], float], y: float, width: int, name: str, *, whole: bool = False) -> str:
    """The axis under a chart, with its name; `whole`: only whole numbers get a figure."""
    parts = [f'<line class="axis" x1="{px(axis.low):.1f}" x2="{px(axis.high):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>']
    edge = -1e9
    for value in axis.ticks(max(3, width // 80)):
        half = len(brief(value)) * _LETTER / 2
        if (not whole or value == int(value)) and px(value) - half > edge + 6:
            parts.append(tick(px(value), y, brief(value), width))
            edge = px(value) + half
    parts.append(text((px(axis.low) + px(axis.high)) / 2, y + 34, name, anchor="middle"))
    return "".join(parts)


def tick(x: float, y: float, label: str, width: int) -> str:
    half = len(label) * _LETTER / 2
    anchor, at = ("end", width - 2.0) if x + half > width else ("start", 2.0) if x < half else ("middle", x)
    return f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{y + 4:.1f}"/>' + text(
        at, y + 17, label, anchor=anchor
    )


def time_ticks(start: datetime, end: datetime, px: Callable[[float], float], y: float, width: int) -> str:
    """The clock, UTC: as many figures as fit, at round times."""
    seconds = max(1.0, (end - start).total_seconds())
    room = max(2, width // 84)
    step = next(
        (choice for choice in _STEPS if seconds / choice <= room), _STEPS[-1] * (1 + int(seconds / _STEPS[-1] / room))
    )
    form = "%H:%M:%S" if step < 60 else "%H:%M" if step < 86400 else "%b %d"
    moment = datetime.fromtimestamp(-(-start.timestamp() // step) * step, timezone.utc)
    parts, edge, day = [], -1e9, ""
    while moment <= end:
        label = moment.strftime(form)
        if form == "%H:%M" and seconds > 86400 and moment.strftime("%b %d") != day:
            day = moment.strftime("%b %d")
            label = day if moment.hour == 0 and moment.minute == 0 else label
        x = px((moment - start).total_seconds())
        if x - len(label) * _LETTER / 2 > edge + 8:
            parts.append(tick(x, y, label, width))
            edge = x + len(label) * _LETTER / 2
        moment += timedelta(seconds=step)
    return "".join(parts)


def _mark(mark: Mark, x: float, top: float, bottom: float) -> str:
    head = f'<path class="{mark.kind}-head" d="M{x - 4.5:.1f} {top - 8:.1f}h9l-4.5 8z"/>'
    return (
        f'<g class="mark"><title>{safe(mark.label)}</title>'
        f'<line class="{mark.kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>{head}</g>'
    )


def _line(
    drawn: Sequence[Sequence[tuple[float, float]]], number: int, stairs: bool, series: Series, percent: bool
) -> str:
    if not drawn:
        return ""
    fine = " fine" if number and not stairs and len(series.points) > 120 else ""
    last = series.points[-1][1]
    title = f"{series.name}: {last * 100:.4g} % at the end" if percent else f"{series.name}: {brief(last)} at the end"
    path = ""
    for points in drawn:
        path += f"M{points[0][0]:.1f} {points[0][1]:.1f}"
        path += "".join(f"H{x:.1f}V{y:.1f}" if stairs else f"L{x:.1f} {y:.1f}" for x, y in points[1:])
    x, y = drawn[-1][-1]
    return (
        f'<path class="line s{number}{fine}" d="{path}"><title>{safe(title)}</title></path>'
        f'<circle class="dot s{number}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
    )


# ------------------------------------------------------------------------------------------------------------ timeline
@dataclass(frozen=True)
class Bar:
    """One instance on the time line. `trained`: when its trainer began; `kind` spot, on-demand or free."""

    zone: str
    label: str
    says: str
    start: datetime
    end: datetime
    trained: datetime | None
    kind: str
    interrupted: bool
    moved: bool = False  # the volume came from another zone


def timeline(bars: Sequence[Bar], start: datetime, end: datetime, width: int) -> str:
    """Zones as rows, instances as bars; a dashed line leads from an interrupted instance to its successor."""
    left, right, lane, head = 8, 8, 28, 34
    seconds = max(1.0, (end - start).total_seconds())

    def px(offset: float) -> float:
        return left + min(1.0, max(0.0, offset / seconds)) * (width - left - right)

    def at(moment: datetime) -> float:
        return px((moment - start).total_seconds())

    lanes, heads, y = _lanes(bars, at, lane, head)
    parts = []
    for _, top in heads:
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{top + 4:.1f}" y2="{top + 4:.1f}"/>')
    order = sorted(range(len(bars)), key=lambda index: bars[index].start)
    for before, after in pairwise(order):
        if bars[after].moved:
            onward = at(bars[after].trained or bars[after].start)  # old and new run side by side for two minutes
            parts.append(_move(at(bars[before].end), lanes[before] + 9, onward, lanes[after] + 9))
    parts += [text(left, top + 20, cut(zone, (width - left - right) / 9), cls="zone") for zone, top in heads]
    for index in order:
        parts.append(_bar(bars[index], at(bars[index].start), at(bars[index].end), lanes[index], at))
    foot = y + 8
    parts.append(f'<line class="axis" x1="{left}" x2="{width - right}" y1="{foot:.1f}" y2="{foot:.1f}"/>')
    parts.append(time_ticks(start, end, px, foot, width))
    zones = ", ".join(dict.fromkeys(bar.zone for bar in bars))
    summary = f"{len(bars)} instances in {zones}; each is listed in the table of instances."
    return svg("timeline", width, int(foot + 26), "Instances over time and zones", summary, parts)


def _lanes(
    bars: Sequence[Bar], at: Callable[[datetime], float], lane: int, head: int
) -> tuple[dict[int, float], list[tuple[str, float]], float]:
    """The y of each bar, the zones with theirs, and the foot; bars of a zone that overlap get rows of their own."""
    lanes: dict[int, float] = {}
    heads = []
    y = 0.0
    for zone in dict.fromkeys(bar.zone for bar in sorted(bars, key=lambda bar: bar.start)):
        heads.append((zone, y))
        y += head
        rows: list[float] = []
        for index in sorted((i for i, bar in enumerate(bars) if bar.zone == zone), key=lambda i: bars[i].start):
            row = next((n for n, edge in enumerate(rows) if edge <= at(bars[index].start) + 0.5), len(rows))
            rows[row:] = [max(at(bars[index].end), at(bars[index].start) + 3), *rows[row + 1 :]]
            lanes[index] = y + row * lane
        y += lane * len(rows)
    return lanes, heads, y


def _bar(bar: Bar, x: float, end: float, y: float, at: Callable[[datetime], float]) -> str:
    long = max(3.0, end - x)
    booted = long if bar.trained is None else min(long, max(0.0, at(bar.trained) - x))
    parts = [f"<title>{safe(bar.says)}</title>"]
    parts.append(f'<rect class="bar {bar.kind}" x="{x:.1f}" y="{y:.1f}" width="{long:.1f}" height="18" rx="4"/>')
    if booted > 1:
        parts.append(f'<rect class="boot" x="{x:.1f}" y="{y:.1f}" width="{booted:.1f}" height="18" rx="4"/>')
    room = long - booted - 14
    if len(bar.label) * 7.0 < room:
        parts.append(text(x + booted + 7, y + 13, bar.label, cls=f"in-bar on-{bar.kind}"))
    if bar.interrupted:
        tip = x + long
        parts.append(f'<path class="interruption-head" d="M{tip - 5:.1f} {y - 6:.1f}h10l-5 8z"/>')
        parts.append(f'<line class="interruption" x1="{tip:.1f}" x2="{tip:.1f}" y1="{y:.1f}" y2="{y + 18:.1f}"/>')
    return f'<g class="stay">{"".join(parts)}</g>'


def _move(x1: float, y1: float, x2: float, y2: float) -> str:
    middle = (x1 + x2) / 2
    return f'<path class="move" d="M{x1:.1f} {y1:.1f}C{middle:.1f} {y1:.1f} {middle:.1f} {y2:.1f} {x2:.1f} {y2:.1f}"/>'


# ---------------------------------------------------------------------------------------------------------------- bars
def cost_bars(rows: Sequence[tuple[str, float, str, str]], width: int) -> str:
    """Horizontal bars, one under another: (label, dollars, class, text of the amount)."""
    highest = max((dollars for _, dollars, _, _ in rows), default=0.0) or 1.0
    room = max(len(amount) for _, _, _, amount in rows) * 8.5 + 12
    parts = []
    for index, (label, dollars, kind, amount) in enumerate(rows):
        y = index * 56
        long = max(3.0, dollars / highest * (width - room))
        parts.append(text(0, y + 15, label, cls="bar-name"))
        parts.append(f'<rect class="bar {kind}" x="0" y="{y + 22}" width="{long:.1f}" height="22" rx="4"/>')
        parts.append(text(long + 8, y + 38, amount, cls="bar-amount"))
    summary = "; ".join(f"{label}: {amount}" for label, _, _, amount in rows)
    return svg("cost", width, 56 * len(rows), "What the instances cost, beside on-demand", summary, parts)


def stems(points: Sequence[tuple[float, float, str]], start: datetime, end: datetime, width: int, summary: str) -> str:
    """Short lines up from a time axis: (seconds since `start`, value, label)."""
    left, right, top, height = 52, 12, 12, 170
    foot = height - 30
    axis = replace(axis_of([value for _, value, _ in points] + [0.0]), low=0.0)
    seconds = max(1.0, (end - start).total_seconds())

    def px(offset: float) -> float:
        return left + min(1.0, max(0.0, offset / seconds)) * (width - left - right)

    def py(value: float) -> float:
        return top + (1 - axis.share(value)) * (foot - top)

    parts = []
    for tick in axis.ticks(3):
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{py(tick):.1f}" y2="{py(tick):.1f}"/>')
        parts.append(text(left - 8, py(tick) + 4, f"{brief(tick)} s", anchor="end"))
    for offset, value, says in points:
        x, y = px(offset), py(value)
        parts.append(
            f'<g><title>{safe(says)}</title><line class="stem" x1="{x:.1f}" x2="{x:.1f}" y1="{foot}" y2="{y:.1f}"/>'
            f'<circle class="dot s0" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/></g>'
        )
    parts.append(f'<line class="axis" x1="{left}" x2="{width - right}" y1="{foot}" y2="{foot}"/>')
    parts.append(time_ticks(start, end, px, foot, width))
    return svg("stalls", width, height, "Checkpoints", summary, parts)


# ----------------------------------------------------------------------------------------------------------- the pieces
def text(x: float, y: float, content: object, cls: str = "tick", anchor: str = "start") -> str:
    end = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="{cls}" x="{x:.1f}" y="{y:.1f}"{end}>{safe(content)}</text>'


def svg(name: str, width: int, height: int, title: str, summary: str, parts: Iterable[str]) -> str:
    key = f"{name}-{width}"
    return (
        f'<svg class="chart" role="img" aria-labelledby="{key}-t {key}-d" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}"><title id="{key}-t">{safe(title)}</title>'
        f'<desc id="{key}-d">{safe(summary)}</desc>{"".join(parts)}</svg>'
    )
