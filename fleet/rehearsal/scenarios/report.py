"""The end of a rehearsal as a person reads it: instances on one time axis, the figures, the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spotheal.agent.protocol.names import Phase
from spotheal.fleet.rehearsal.scenarios.summary import End, InstanceStory, Story, Summary

_WIDTH = 22  # so that a row fits 80 columns
_ENDS = {"interrupted": "red", "killed": "red", "failed": "red", "done": "green"}
_NO_STEPS = "unknown: the trainer writes no progress file (docs/contract.md)"


def report(summary: Summary) -> RenderableType:
    notes = (Text(f"note: {note}") for note in summary.notes)
    judged = verdict(summary.broken, survived=summary.survived)
    return Group(timeline(summary), figures(_figures(summary)), judged, *notes)


def timeline(summary: Summary) -> RenderableType:
    """One row a machine: `.` boot and healing, `#` training, then how it ended."""
    story = summary.story
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("instance", "zone", f"0 s{story.end.seconds:>{_WIDTH - 5}.0f} s", "steps", "end"):
        table.add_column(title, no_wrap=True)
    for instance in story.instances:
        end = _end(instance, story)
        table.add_row(
            instance.instance,
            instance.zone,
            _bar(instance, story.end.seconds),
            _steps(instance),
            Text(end, _ENDS.get(end, "yellow")),
        )
    return table


def _end(instance: InstanceStory, story: Story) -> str:
    """How the run ended, for the machine that ended it; the cancelled fleet is only how it went away."""
    ends = [phase.value for phase in Phase if phase.is_end]
    last = instance is story.instances[-1] and instance.end == "cancelled"
    return str(story.end.phase) if last and story.end.phase in ends else instance.end


def _bar(instance: InstanceStory, seconds: float) -> Text:
    def column(moment: float) -> int:
        return min(_WIDTH, max(0, round(moment / max(seconds, 1e-9) * _WIDTH)))

    ended = column(seconds if instance.ended is None else instance.ended)
    start_column = column(instance.launched)
    trained = ended if instance.trained is None else min(column(instance.trained), ended)
    return Text.assemble(
        " " * start_column,
        ("." * (trained - start_column), "dim"),
        ("#" * (ended - trained), "cyan"),
        " " * (_WIDTH - ended),
    )


def _steps(instance: InstanceStory) -> str:
    if instance.last_step is None:
        return "-"
    return f"{'?' if instance.resumed_step is None else instance.resumed_step} to {instance.last_step}"


def figures(rows: Iterable[tuple[str, str]]) -> RenderableType:
    """Name and value, a line each."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def _figures(summary: Summary) -> Iterable[tuple[str, str]]:
    story, end = summary.story, summary.story.end
    return [
        ("job", f"{story.job} {story.run}: {_outcome(end)}"),
        ("scenario", f"{story.scenario} (seed {story.seed}): {story.events_taken} of {story.events_planned} events"),
        ("machines", _machines(summary)),
        ("API", f"{end.api_calls} calls, {story.throttled_calls} of them throttled"),
        ("steps", _all_steps(summary)),
        ("weights", _weights(summary)),
        *([("generators", _generators(story))] if story.generators_apart else []),
        *([] if story.webhook is None else [("webhook", f"told: {', '.join(story.webhook) or 'nothing'}")]),
        ("fleet", fleet(end)),
        ("left", f"{_counted(end.volumes_left, 'volume')}, {_counted(end.snapshots_left, 'snapshot')}"),
        ("seconds", f"{end.seconds:.0f}"),
    ]


def _machines(summary: Summary) -> str:
    story = summary.story
    zones = len({instance.zone for instance in story.instances})
    ends = f"{_counted(story.notices, 'notice')}, {_counted(story.kills, 'kill')} without notice"
    return f"{len(story.instances)} in {_counted(zones, 'zone')}: {ends}, zone moves {_known(story.zone_moves)}"


def _all_steps(summary: Summary) -> str:
    total, redone = summary.story.steps_total, summary.steps_redone
    if total is None and redone is None:
        return _NO_STEPS
    noticed, otherwise = _known(summary.steps_lost_with_notice), _known(summary.steps_lost_without_notice)
    return f"{_known(total)} in all; done again {_known(redone)}: {noticed} after notices, {otherwise} otherwise"


def fleet(end: End) -> str:
    if (end.fleet_state or "").startswith(("cancelled", "deleted")):
        return f"cancelled by {end.fleet_cancelled_by or 'nobody'}"
    return end.fleet_state or "unknown"


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")


def _outcome(end: End) -> str:
    """Phase and the first line of its reason; the last lines of a trainer that failed are in its log."""
    return ", ".join(part for part in (end.phase or "unknown", end.reason.partition("\n")[0]) if part)


def _weights(summary: Summary) -> str:
    story = summary.story
    if summary.compares_nothing:
        return "nothing to compare: the trainer leaves none (.pt, .safetensors, .npz …) in its results or checkpoints"
    if summary.exact is None:
        return f"{(story.final_sha256 or 'none found')[:12]}, not compared"
    if summary.exact:
        return f"{(story.final_sha256 or '')[:12]}, bit for bit those of an uninterrupted run"
    return f"{(story.final_sha256 or '')[:12]}, not the {(story.reference_sha256 or '')[:12]} of an uninterrupted run"


def _generators(story: Story) -> str:
    """No fault in itself: a script that never seeds `random` leaves another state of it in every process."""
    names = ", ".join(story.generators_apart)
    return f"{names} not as in an uninterrupted run: seed at the start what the training draws from"


def verdict(broken: Sequence[str], *, survived: bool = False) -> RenderableType:
    """That it passed, or a line an expectation that was not met; `survived`: only the comparison of weights failed."""
    if not broken:
        return Text("The rehearsal passed.", "bold green")
    heading = Text("The rehearsal did not pass:", "bold red")
    if survived:
        heading = Text("The job survived every fault. Only the comparison of its weights did not pass:", "bold yellow")
    return Group(heading, *(Text(f"  - {line}") for line in broken))


def _known(value: object) -> str:
    return "unknown" if value is None else str(value)
