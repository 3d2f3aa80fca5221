"""A sweep as one static page: its best run, the curves of all, the metric over each parameter, a row a run. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from statistics import median
from typing import Any
from urllib.parse import quote

from spotheal.agent.protocol.names import LAYOUT, Phase, StoreUrl
from spotheal.fleet.report.charts import safe
from spotheal.fleet.report.pieces import (
    HALF,
    WIDE,
    card,
    cell,
    document,
    key,
    legend,
    number,
    safe_long,
    stacked,
    three,
)
from spotheal.fleet.report.series import brief
from spotheal.fleet.sweep import report_charts
from spotheal.fleet.sweep.progress import in_words
from spotheal.fleet.sweep.report import PARAMETERS_MAX, VALUES_MAX, Parameter, SweepReport

_ROWS_MAX = 1000
_BAD = {Phase.FAILED.value, Phase.SETUP_FAILED.value, Phase.PARKED.value}


def page(report: SweepReport) -> str:
    """The whole document, valid on its own; `.encode()` never fails."""
    return document(f"{report.job}: sweep", "".join([_head(report), _tiles(report), *_cards(report), _foot(report)]))


def _cards(report: SweepReport) -> Iterable[str]:
    yield _curves(report)
    yield from _parameters(report)
    yield _parallel(report)
    yield _table(report)
    yield _facts(report)


def _head(report: SweepReport) -> str:
    kind = "done" if report.phase == Phase.DONE.value else "bad" if report.phase in _BAD else ""
    count = report.count
    sentence = f"<strong>{count['done']} of {count['all']} runs</strong> are done"
    if (best := report.best) is not None:
        settings = ", ".join(f"{parameter.name} {in_words(best['parameters'][parameter.name])}"
                        for parameter in report.parameters[:4] if parameter.name in best["parameters"])
        value = _value(report, report.values[int(best["index"])])
        sentence += (
            f"; the best {safe(_plain(report))} is <strong>{value}</strong>, of"
            f' <a href="#run-{best["index"]}">run {best["index"]}</a>{": " if settings else ""}{safe(settings)}'
        )
    return (
        f'<header><p class="brand">spotheal sweep</p><div class="title"><h1>{safe(report.job)}</h1>'
        f'<span class="pill {kind}">{safe(report.phase)}</span></div><p class="lead">{sentence}.</p></header>'
    )


def _tiles(report: SweepReport) -> str:
    count, values = report.count, sorted(report.values.values())
    best = _value(report, values[0] if report.smallest else values[-1]) if values else "–"
    median_text = f"median {_value(report, median(values))}" if values else "no run has written it"
    failed = count["failed"]
    tiles = [
        ("Runs done", f"{count['done']} of {count['all']}", f"{len(report.parameters)} parameters differ", ""),
        (f"Best {_plain(report)}", best, median_text, "good"),
        ("At work", str(count["running"]), f"{count['waiting']} waiting", ""),
        ("Failed", str(failed), "each says why below; they can begin again" if failed else "none", ""),
    ]
    return '<div class="tiles">' + "".join(
        f'<div class="tile {cls}"><div class="name">{safe(name)}</div><div class="value">{safe(value)}</div>'
        f'<div class="more">{safe(note)}</div></div>'
        for name, value, note, cls in tiles
    ) + "</div>"  # fmt: skip


def _value(report: SweepReport, value: float) -> str:
    return f"{value * 100:.2f} %" if report_charts.is_share(report.metric, report.values.values()) else brief(value)


def _plain(report: SweepReport) -> str:
    return report.metric.removeprefix("best_")


def _keys(report: SweepReport) -> str:
    best = [row for row in report.rows if int(row["index"]) in report.values][: report_charts.COLOURED]
    keys = "".join(key(f"s{place}", f"run {row['index']}") for place, row in enumerate(best))
    return legend(keys + (key("rest", "the others") if len(report.rows) > len(best) else ""))


def _curves(report: SweepReport) -> str:
    if not report.curves:
        return card("Learning curves", "No run has written a curve of this metric to its metrics file: see"
                    " docs/contract.md for how it can.", "")  # fmt: skip
    note = f"{report.curve} over the steps of each run."
    if len(report.rows) > report_charts.COLOURED:
        note += f" The {report_charts.COLOURED} best have colours."
    return card("Learning curves", note, _keys(report) + three(partial(report_charts.curves, report)))


def _parameters(report: SweepReport) -> Iterable[str]:
    drawn = [parameter for parameter in report.parameters if set(parameter.values) & set(report.values)][
        :PARAMETERS_MAX
    ]
    for place in range(0, len(drawn), 2):
        pair = drawn[place : place + 2]
        wide = HALF if len(pair) == 2 else WIDE
        cards = "".join(_parameter(report, parameter, place + offset, wide) for offset, parameter in enumerate(pair))
        yield f'<div class="half">{cards}</div>' if len(pair) == 2 else cards


def _parameter(report: SweepReport, parameter: Parameter, place: int, wide: int) -> str:
    chart = report_charts.scatter if parameter.numeric else report_charts.strips

    def draw(width: int) -> str:
        return chart(report, parameter, place, width)

    rest = len(parameter.kinds) - VALUES_MAX
    note = f"{report.metric} {'over' if parameter.numeric else 'with each value of'} it; one dot is one run."
    note += f" {rest} values more are left out." if not parameter.numeric and rest > 0 else ""
    return card(parameter.name, note, three(draw, wide=wide))


def _parallel(report: SweepReport) -> str:
    if len(report.parameters) < 2 or len(report.values) < 2:
        return ""
    note = f"Each line is one run, from its parameters to its {report.metric}."
    return card("All parameters together", note, _keys(report) + three(partial(report_charts.parallel, report)))


# ------------------------------------------------------------------------------------------------------------ the table
def _table(report: SweepReport) -> str:
    rows = "".join(_row(report, row) for row in report.rows[:_ROWS_MAX])
    hidden = len(report.rows) - _ROWS_MAX
    note = f"By {report.metric}, the best first. Each run's number leads to its status, metrics and logs in S3."
    note += f" {hidden} more are left out." if hidden > 0 else ""
    heads = ("Run", "Parameters", "State", "Instances", "Step", report.metric)
    return card("Runs", note, stacked(heads, rows, 3))


def _row(report: SweepReport, row: Mapping[str, Any]) -> str:
    index = int(row["index"])
    value = report.values.get(index)
    names = [parameter.name for parameter in report.parameters]
    settings = ", ".join(f"{name} {in_words(row['parameters'][name])}" for name in names if name in row["parameters"])
    reason = str(row["reason"]).partition("\n")[0][:200] if row["state"] == "failed" else ""
    kind = {"done": "free", "failed": "bad"}.get(str(row["state"]), "")
    step = "–" if row["step"] is None else number(row["step"])
    return (
        f'<tr id="run-{index}"><td data-name="Run"><a href="{safe_long(_console(report, index))}">{index}</a></td>'
        + f'<td class="whole" data-name="Parameters">{safe_long(settings) or "–"}<small>{safe(reason)}</small></td>'
        + f'<td data-name="State"><span class="tag {kind}">{safe(row["state"])}</span></td>'
        + cell("Instances", row["instances"] or "–", number=True)
        + cell("Step", step, number=True)
        + cell(report.metric, "–" if value is None else _value(report, value), number=True)
        + "</tr>"
    )


def _console(report: SweepReport, index: int) -> str:
    """The run's own folder of the store, in AWS's console."""
    url = StoreUrl.parse(report.store).below(LAYOUT.entry(index))
    return f"https://s3.console.aws.amazon.com/s3/buckets/{url.bucket}?prefix={quote(url.prefix)}/"


def _facts(report: SweepReport) -> str:
    rows = [("Run", report.run), ("Store", report.store), ("Phase", report.phase)]
    rows += [(name, in_words(value)) for name, value in list(report.constants.items())[:40]]
    items = "".join(f"<dt>{safe(name)}</dt><dd>{safe(value)}</dd>" for name, value in rows if value)
    reason_block = f"<pre>{safe_long(report.reason[:2000])}</pre>" if report.reason else ""
    note = "Parameters listed here are the same in every run." if report.constants else ""
    return card("The sweep", note, f"<dl>{items}</dl>{reason_block}")


def _foot(report: SweepReport) -> str:
    return f"<footer><p>Made {report.created:%Y-%m-%d %H:%M:%S} UTC by fleetctl sweep report.</p></footer>"
