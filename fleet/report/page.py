"""A report as one static page: nothing is loaded from elsewhere, no script runs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from decimal import Decimal
from functools import partial
from itertools import pairwise

from spotheal.agent.protocol.names import Phase
from spotheal.fleet.report.charts import LineChart, Mark, cost_bars, line_chart, safe, stems, timeline
from spotheal.fleet.report.files_card import files_card
from spotheal.fleet.report.pieces import (
    HALF,
    NUMBER,
    WIDE,
    card,
    cell,
    counted,
    document,
    key,
    legend,
    lines,
    number,
    safe_long,
    shape,
    stacked,
    three,
)
from spotheal.fleet.report.report import Report
from spotheal.fleet.report.series import Series, brief, losses, other_series, scores
from spotheal.fleet.run.store_documents import sensible
from spotheal.fleet.run.table import duration

_REASON_MAX = 6000
_INSTANCES_SHOWN = 100
_TABLE_ROWS = 12
_BAD = {Phase.FAILED.value, Phase.SETUP_FAILED.value, Phase.PARKED.value}


@sensible
def page(report: Report) -> str:
    """The whole document, valid on its own; `.encode()` never fails."""
    body = "".join([_head(report), _tiles(report), *_cards(report), _foot(report)])
    return document(f"{report.job}: training report", body)


def _cards(report: Report) -> Iterable[str]:
    yield _timeline(report)
    yield _progress(report)
    yield _curves(report)
    yield _checkpoints(report)
    yield _cost(report)
    yield _steps(report)
    yield files_card(report.receipt)
    yield _instances(report)
    yield _facts(report)


# ------------------------------------------------------------------------------------------------------------ the head
def _head(report: Report) -> str:
    banner = f'<p class="banner">{safe_long(report.banner)}</p>' if report.banner else ""
    kind = "done" if report.is_done else "bad" if report.phase in _BAD else ""
    return (
        f'<header><p class="brand">spotheal training report</p><div class="title"><h1>{safe(report.job)}</h1>'
        f'<span class="pill {kind}">{safe(report.phase)}</span></div>'
        f'<p class="lead">{_sentence(report)}</p>{banner}</header>'
    )


def _sentence(report: Report) -> str:
    """What happened, in one sentence."""
    stays = report.receipt.bill.stays
    zones = {stay.zone for stay in stays}
    took = duration((report.end - report.start).total_seconds())
    steps_done = report.receipt.steps.done
    steps = f"<strong>{number(steps_done)} steps</strong> in {took}" if steps_done else f"<strong>{took}</strong>"
    machines = f"{counted(len(stays), 'instance')} in {counted(len(zones), 'zone')}"
    count = len(report.lost)
    survived = f"machines were lost <strong>{_times(count)}</strong>" if count else "no machine was lost"
    verb = "have run" if not report.ended else "ran"
    repeated = report.receipt.steps.redone + report.receipt.steps.lost
    no_loss = "; no step was lost" if count and steps_done and not repeated and _is_sure(report) else ""
    return (
        f"{steps} {verb} on {machines}; {survived}{no_loss}."
        if steps_done
        else f"{steps} on {machines}; {survived}{no_loss}."
    )


def _is_sure(report: Report) -> bool:
    """Whether every step that was lost is known: of a machine that went without notice the last half minute is not."""
    return report.knows_every_resume and not _silent(report)


def _silent(report: Report) -> int:
    """Machines that went without a notice."""
    return max(0, len(report.lost) - len(report.taken))


def _tiles(report: Report) -> str:
    receipt, steps = report.receipt, report.receipt.steps
    rate = receipt.bill.rate
    cost_more = "an estimate, everything counted" if report.ended else f"{_money(rate)} an hour now"
    tiles = [("Cost", "< $0.01" if receipt.is_under_a_cent else _money(receipt.total), cost_more, "")]
    if receipt.saved is not None and receipt.on_demand:
        share = f"{receipt.saved_percent or 0:.0f} %"
        tiles.append(("Saved against on-demand", share, f"{_money(receipt.saved)} less for the same hours",
                      "good" if receipt.saved > 0 else ""))  # fmt: skip
    else:
        tiles.append(("Saved against on-demand", "–", "no list price is known", ""))
    silent = _silent(report)
    words = [f"{silent} without notice" if silent else "", f"{counted(receipt.moves, 'move')} to another zone"
             if receipt.moves else ""]  # fmt: skip
    nothing = "no machine was taken" if report.ended else "none so far"
    note = ", ".join(word for word in words if word) or ("each with notice" if report.taken else nothing)
    tiles.append(("Interruptions", str(len(report.lost)), note, ""))
    redone = steps.redone + steps.lost
    share = f"{100 * redone / (steps.done + redone):.2g} % of the work" if steps.done and redone else (
        "every step counted once" if steps.done else "the trainer reports no steps"
    )
    sure = bool(steps.done) and _is_sure(report)
    share = share if sure or redone or not steps.done else "as far as is known"
    good = "good" if sure and not redone else ""
    tiles.append(("Steps done again", number(redone) if steps.done else "–", share, good))
    return '<div class="tiles">' + "".join(
        f'<div class="tile {cls}"><div class="name">{safe(name)}</div><div class="value">{safe(value)}</div>'
        f'<div class="more">{safe(note)}</div></div>'
        for name, value, note, cls in tiles
    ) + "</div>"  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- the charts
def _timeline(report: Report) -> str:
    kinds = {bar.kind for bar in report.bars}
    kinds_shown = [("bar spot", "spot")] if "spot" in kinds else []
    kinds_shown += [("bar free", "spot, free: taken within its first hour")] if "free" in kinds else []
    kinds_shown += [("bar on-demand", "on-demand")] if "on-demand" in kinds else []
    keys = "".join(key(cls, name) for cls, name in kinds_shown)
    keys += key("boot", "starting and healing", under="bar spot")
    if any(bar.interrupted for bar in report.bars):
        keys += shape('<path class="interruption-head" d="M2 3h10l-5 8z"/>', "taken by AWS")
    if any(bar.moved for bar in report.bars):
        keys += shape('<path class="move" d="M0 7h16"/>', "the volume moved to this zone", 16)

    def draw(width: int) -> str:
        return timeline(report.bars, report.start, report.end, width)

    note = "Each bar is one machine. When AWS takes one away, the fleet starts another and the run goes on."
    return card("Machines and zones", note, legend(keys) + three(draw), tail="Times are UTC.")


def _progress(report: Report) -> str:
    """Steps over time: steps done, and steps saved."""
    if len(report.samples) < 2:
        return ""
    start = report.start

    def offset(moment: datetime) -> float:
        return (moment - start).total_seconds()

    begins = frozenset(
        offset(after.time) for before, after in pairwise(report.samples) if before.instance != after.instance
    )
    done_steps = Series("done", tuple((offset(sample.time), float(sample.step)) for sample in report.samples), begins)
    saves = [sample for sample in report.samples if sample.saved is not None]
    saved = Series("saved", tuple((offset(sample.time), float(sample.saved or 0)) for sample in saves))
    noticed = {interruption.instance: interruption.time for interruption in report.taken}
    losses = [(stay.instance, noticed.get(stay.instance, stay.end)) for stay in report.lost]
    marks = [Mark(offset(time), f"{name} is lost at {time:%H:%M:%S} UTC", "interruption") for name, time in losses]
    series = [curve for curve in (done_steps, saved) if curve.points]
    chart = LineChart("progress", "Steps over time", "Steps done, and the newest durable checkpoint.", series, marks,
                      stairs=frozenset({"saved"}), times=(report.start, report.end), y_low=0.0)  # fmt: skip
    keys = key("s0", "step") + (key("s1", "newest checkpoint") if saved.points else "") + _mark_keys(marks)
    note = "The gap between the lines is what an interruption without notice would cost."
    return card("Progress", note, legend(keys) + three(lambda width: line_chart(chart, width)))


def _curves(report: Report) -> str:
    marks = _step_marks(report)
    cards = []
    for name, curves, note in (
        ("Loss", losses(report.series), "Over the steps of the run."),
        ("Accuracy", scores(report.series), "Over the steps of the run, as the trainer reports it."),
    ):
        if not curves:
            continue
        percent = name == "Accuracy" and all(0 <= y <= 1 for curve in curves for _, y in curve.points)
        chart = LineChart(name.lower(), name, f"{name} over the steps of the run.", curves, marks, percent=percent)
        keys = "".join(key(f"s{number}", curve.name) for number, curve in enumerate(curves)) + _mark_keys(marks)
        cards.append((name, note, chart, keys, curves))
    others_card = _other_curves(other_series(report.series), marks, is_open=not cards)
    if not cards:
        note = ("The trainer wrote neither to its metrics file nor to its progress file: see"
                " docs/contract.md for how it can.")  # fmt: skip
        return others_card or card("Loss and accuracy", note, "")
    wide = HALF if len(cards) > 1 else WIDE
    drawn = [
        card(name, note, legend(keys) + three(lambda width, chart=chart: line_chart(chart, width), wide=wide)  # type: ignore[misc]
              + _figures(name, curves))
        for name, note, chart, keys, curves in cards
    ]  # fmt: skip
    return (f'<div class="half">{"".join(drawn)}</div>' if len(cards) > 1 else drawn[0]) + others_card


def _other_curves(curves: Sequence[Series], marks: Sequence[Mark], *, is_open: bool) -> str:
    """A chart each, two in a row; folded away if there is a chart of loss or accuracy."""
    drawn = []
    for place, curve in enumerate(curves):
        note = f"{curve.name} over the steps of the run."
        chart = LineChart(f"other-{place}", f"Figure {curve.name}", note, [curve], marks)
        drawn.append(card(curve.name, "", three(partial(line_chart, chart), wide=HALF)))
    rows = "".join(f'<div class="half">{"".join(drawn[at : at + 2])}</div>' for at in range(0, len(drawn), 2))
    if not rows or is_open:
        return rows
    names = safe_long(", ".join(curve.name for curve in curves))
    return f"<details><summary>Other figures: {names}</summary>{rows}</details>"


def _step_marks(report: Report) -> list[Mark]:
    marks = [
        Mark(float(loss.step), f"interruption at step {loss.step}: {loss.instance}", "interruption")
        for loss in report.taken
        if loss.step is not None
    ]
    positions = {mark.x for mark in marks}
    return marks + [
        Mark(float(resume.step), f"resumed at step {resume.step} on {resume.instance}")
        for resume in report.resumes
        if resume.step and float(resume.step) not in positions
    ]


def _figures(name: str, curves: Sequence[Series]) -> str:
    """The same figures as a table, for readers who cannot see the chart."""
    rows = []
    for curve in curves:
        stride = max(1, -(-len(curve.points) // _TABLE_ROWS))
        points = list(curve.points[::stride])
        points += [curve.points[-1]] if points[-1] != curve.points[-1] else []
        rows += [(curve.name, number(int(x)), brief(y)) for x, y in points]
    body = "".join(f"<tr><td>{safe(n)}</td><td{NUMBER}>{x}</td><td{NUMBER}>{y}</td></tr>" for n, x, y in rows)
    heads = f'<th scope="col">Figure</th><th scope="col"{NUMBER}>Step</th><th scope="col"{NUMBER}>Value</th>'
    return (
        f"<details><summary>{name} as a table</summary><table><caption>{name}, some of its points</caption>"
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></details>"
    )


def _checkpoints(report: Report) -> str:
    saves: dict[int, tuple[float, float, float | None]] = {}
    for sample in report.samples:
        if sample.saved is not None and sample.save_seconds is not None:  # reported after its end
            offset = saves[sample.saved][0] if sample.saved in saves else (sample.time - report.start).total_seconds()
            saves[sample.saved] = (offset, sample.save_seconds, sample.stall_seconds)
    if not saves:
        return ""
    points = [
        (offset, seconds, f"checkpoint of step {step}: {seconds:.2f} s to write"
         + (f", training stood for {stall:.3f} s" if stall is not None else ""))
        for step, (offset, seconds, stall) in sorted(saves.items())
    ]  # fmt: skip
    points = points[:: max(1, -(-len(points) // 300))]
    stalls = [stall for _, _, stall in saves.values() if stall is not None]
    longest = max(seconds for _, seconds, _ in saves.values())
    summary = f"{counted(len(saves), 'checkpoint')} seen; the longest took {longest:.2f} s to write"
    if stalls:
        share = 100 * sum(stalls) / max(1.0, (report.end - report.start).total_seconds())
        summary += f"; training stood still {max(stalls):.3f} s at most, {sum(stalls):.2f} s in all ({share:.2g} %)"
    note = f"{summary}. Each line is one checkpoint, as high as it took to write."
    return card("Checkpoints", note, three(lambda width: stems(points, report.start, report.end, width, summary)))


# -------------------------------------------------------------------------------------------------------------- tables
def _cost(report: Report) -> str:
    receipt = report.receipt
    rows = [("This run's instances", float(receipt.instances), "spot", _money(receipt.instances))]
    if receipt.on_demand is not None:
        rows.append(("The same hours on demand", float(receipt.on_demand), "on-demand", _money(receipt.on_demand)))
    body = "".join(
        f"<tr><td>{safe(line.name)}<small>{safe('; '.join(filter(None, (line.quantity, line.note))))}</small></td>"
        f"<td{NUMBER}>{_money(line.dollars)}</td></tr>"
        for line in receipt.lines
    )
    table = (
        '<table><thead><tr><th scope="col">Receipt</th><th scope="col" class="number">US dollars</th></tr></thead>'
        f'<tbody>{body}</tbody><tfoot><tr><th scope="row">Total, about</th><td class="number">{_money(receipt.total)}'
        "</td></tr></tfoot></table>"
    )

    def draw(width: int) -> str:
        return cost_bars(rows, width)

    storage_note = ""
    if receipt.kept_month:
        storage_note = (
            f" What is still there costs about {_money(receipt.kept_month)} a month; fleetctl clean removes it."
        )
    bars = f"<div>{three(draw, wide=HALF - 5)}{_saving_reasons(report)}</div>"
    return card("Cost", f"An estimate from AWS's prices at the time; AWS's bill counts.{storage_note}",
                 f'<div class="split">{bars}<div>{table}</div></div>')  # fmt: skip


def _saving_reasons(report: Report) -> str:
    """The reasons for the difference to on-demand."""
    stays = report.receipt.bill.stays
    spot = [stay for stay in stays if stay.lifecycle == "spot" and stay.dollars is not None and not stay.free]
    rows = []
    if seconds := sum(stay.seconds for stay in spot):
        paid = sum((stay.dollars or Decimal(0) for stay in spot), Decimal(0))
        listed = [stay.on_demand for stay in spot if stay.on_demand is not None]
        on_demand = f", ${sum(listed, Decimal(0)) * 3600 / seconds:.3f} on demand" if len(listed) == len(spot) else ""
        rows.append(("Spot, an hour", f"${paid * 3600 / seconds:.3f} on average{on_demand}"))
    if report.receipt.free_seconds:
        rows.append(("Free", f"{duration(report.receipt.free_seconds)}: AWS charges nothing for what it takes in the"
                     " first hour"))  # fmt: skip
    rescue = sum(stay.seconds for stay in stays if stay.lifecycle != "spot")
    if rescue:
        rows.append(("On-demand", f"{duration(rescue)} at the full price"))
    return "<dl>" + "".join(f"<dt>{safe(name)}</dt><dd>{safe(text)}</dd>" for name, text in rows) + "</dl>"


def _steps(report: Report) -> str:
    if not report.resumes:
        return ""
    rows = "".join(
        "<tr>"
        + cell("When (UTC)", f"{resume.time:%b %d %H:%M:%S}")
        + cell("Instance", resume.instance)
        + cell("Went on at step", "–" if resume.step is None else number(resume.step), number=True)
        + cell("Steps done again", "–" if resume.again is None else number(resume.again), number=True)
        + "</tr>"
        for resume in report.resumes[:_INSTANCES_SHOWN]
    )
    lost, free = report.receipt.steps.lost, report.receipt.free_seconds
    redone = report.receipt.steps.redone
    words = [
        f"{number(redone)} steps were done again in all" if redone or report.knows_every_resume else "",
        "" if report.knows_every_resume else "the trainer does not report at which step each start began",
        f"{number(lost)} done and not saved when the run stopped" if lost else "",
        f"{duration(free)} of machines were free" if free else "",
    ]
    heads = ("When (UTC)", "Instance", "Went on at step", "Steps done again")
    return card("Interruptions and what they cost", "; ".join(filter(None, words)) + ".", stacked(heads, rows, 2))


def _instances(report: Report) -> str:
    ends = {"aws": "taken by AWS", "run": "run ended", "shutdown": "shut down", "unknown": "gone", "": "running"}
    rows = []
    for stay in report.receipt.bill.stays[-_INSTANCES_SHOWN:]:
        tag = "free" if stay.free else stay.lifecycle
        price = "–" if stay.price_now is None else f"${stay.price_now:.4f}"
        cost = "free" if stay.free else "–" if stay.dollars is None else f"${stay.dollars:.4f}"
        rows.append(
            "<tr>"
            + cell("Instance", stay.instance, note=stay.instance_type)
            + cell("Zone", stay.zone)
            + f'<td data-name="Kind"><span class="tag {safe(tag)}">{safe(tag)}</span></td>'
            + cell("Launched (UTC)", f"{stay.start:%b %d %H:%M:%S}")
            + cell("Ran", duration(stay.seconds))
            + cell("End", ends.get(stay.ended_by, stay.ended_by))
            + cell("An hour", price, number=True)
            + cell("Cost", cost, number=True)
            + "</tr>"
        )
    heads = ("Instance", "Zone", "Kind", "Launched (UTC)", "Ran", "End", "An hour", "Cost")
    hidden = len(report.receipt.bill.stays) - len(rows)
    note = f"The newest {len(rows)}; {hidden} before them are left out here." if hidden else ""
    return card("Instances", note, stacked(heads, "".join(rows), 2))


def _facts(report: Report) -> str:
    rows = [
        ("Run", report.run),
        ("Phase", report.phase),
        ("Began", f"{report.start:%Y-%m-%d %H:%M:%S} UTC"),
        ("Ended" if report.ended else "Seen", f"{report.end:%Y-%m-%d %H:%M:%S} UTC"),
        ("Revision", report.revision),
        ("Store", report.store),
        ("Volumes kept", ", ".join(report.kept_volumes)),
    ]
    items = "".join(f"<dt>{safe(name)}</dt><dd>{safe(value)}</dd>" for name, value in rows if value)
    reason = report.reason[:_REASON_MAX]
    reason_block = f"<pre>{lines(reason)}</pre>" if reason else ""
    return card("The job", "", f"<dl>{items}</dl>{reason_block}")


def _foot(report: Report) -> str:
    notes = "".join(f"<p>{safe_long(note)}</p>" for note in report.receipt.notes)
    return f"<footer>{notes}<p>Made {report.created:%Y-%m-%d %H:%M:%S} UTC by fleetctl report.</p></footer>"


def _mark_keys(marks: Sequence[Mark]) -> str:
    kinds = {mark.kind for mark in marks}
    names = (("interruption", "machine lost"), ("resume", "resumed"))
    shapes = {kind: f'<path class="{kind}-head" d="M2 3h10l-5 8z"/>' for kind, _ in names}
    return "".join(shape(shapes[kind], name) for kind, name in names if kind in kinds)


def _money(dollars: Decimal) -> str:
    return "under $0.01" if 0 < dollars < Decimal("0.005") else f"${dollars:,.2f}"


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
