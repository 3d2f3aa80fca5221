"""What a rehearsal proved: figures from its records, and the expectations that were not met. Pure.

The figures come from three witnesses: the rule book (instances, zones, who cancelled the fleet, what is left), the
run's ledger in the store (where each trainer resumed), and the progress file on each machine as the machine left it
(the last step it completed). A figure that none of them can tell is None, never a guess.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from spotheal.agent.protocol.names import SNAPSHOTS_KEPT, Phase
from spotheal.agent.record.lost_work import Attempt, FilesLost, from_nothing

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA_VERSION = 1


class Outcome(ABC):
    """What came of a scenario with a module of its own: everything that was seen."""

    @cached_property
    def broken(self) -> tuple[str, ...]:
        """As of Summary."""
        return tuple(self.faults())

    @property
    def passed(self) -> bool:
        return not self.broken

    def to_document(self) -> dict[str, Any]:
        """The JSON object of `--output json`."""
        verdict = {"outcome": "ok" if self.passed else "failed", "broken": list(self.broken)}
        return {"schema_version": SCHEMA_VERSION, **verdict, **self.figures()}

    @abstractmethod
    def faults(self) -> Iterator[str]:
        """What was not as it should be, a line each."""

    @abstractmethod
    def figures(self) -> dict[str, Any]:
        """What the document tells besides the verdict."""

    @abstractmethod
    def render(self) -> RenderableType:
        """For a person."""


@dataclass(frozen=True)
class End:
    """How a run ended, and what it left: by its status in the store and by the rule book."""

    seconds: float
    phase: str | None
    reason: str
    fleet_state: str | None
    fleet_cancelled_by: str | None  # an instance's id, "operator", None where nobody did
    volumes_left: int
    snapshots_left: int
    api_calls: int = 0
    refused: tuple[str, ...] = ()  # calls of agents that the instances' role does not allow: action and resource

    def faults(self, subject: str = "the job") -> Iterator[str]:
        """Where `what` is not done, or its fleet was not cancelled by an agent."""
        by = self.fleet_cancelled_by
        if self.phase != Phase.DONE.value:
            ended = ": ".join(part for part in (self.phase or "its phase is unknown", self.reason) if part)
            yield f"{subject} did not finish: {ended}"
        if not (self.fleet_state or "").startswith(("cancelled", "deleted")):
            yield f"the fleet was not cancelled: its state is {self.fleet_state or 'unknown'}"
        if by is None or not by.startswith("i-"):
            yield f"the fleet was cancelled by {by or 'nobody'}, not by the agent"
        if self.refused:
            yield f"the role of the instances does not allow {self.refused[0]}"

    def to_document(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": round(self.seconds, 1), "refused": list(self.refused)}


@dataclass(frozen=True)
class InstanceStory:
    """One machine. Times are seconds since the fleet was requested. `end`: interrupted, killed, cancelled, …"""

    instance: str
    zone: str
    instance_type: str
    launched: float
    booted: float | None = None
    trained: float | None = None  # its trainer began
    ended: float | None = None
    end: str = ""
    resumed_step: int | None = None
    last_step: int | None = None
    saved_step: int | None = None

    @property
    def has_trained(self) -> bool:
        return self.trained is not None


@dataclass(frozen=True)
class Story:
    """Everything that was seen."""

    job: str
    run: str
    scenario: str
    seed: int
    end: End
    instances: tuple[InstanceStory, ...]
    events_planned: int
    events_taken: int
    notices: int
    kills: int
    zone_moves: int | None
    zone_moves_planned: int
    steps_total: int | None
    final_sha256: str | None
    reference_sha256: str | None
    reference_made: bool = True
    reference_fault: str = ""
    throttles_planned: int = 0
    throttled_calls: int = 0
    files_lost: tuple[FilesLost, ...] = ()
    not_resumed: tuple[str, ...] = ()  # of trainers that report no steps, by their files
    sees_reads: bool = True  # whether it is known what a trainer reads
    example: bool = True  # the job is ours, so an event that did not take place is a fault of the scenario
    webhook: tuple[str, ...] | None = None  # the events that were told it; None: the job names none
    generators_apart: tuple[str, ...] = ()  # random generators whose last states differ from the uninterrupted run's

    @property
    def reports_no_steps(self) -> bool:
        return all(instance.last_step is None for instance in self.instances)


@dataclass(frozen=True)
class Summary:
    """`broken`: one line an expectation that was not met, empty where the rehearsal passed."""

    story: Story
    steps_redone: int | None
    steps_lost_with_notice: int | None
    steps_lost_without_notice: int | None
    exact: bool | None
    broken: tuple[str, ...]

    @property
    def compares_nothing(self) -> bool:
        """The uninterrupted run was made too, and neither left weights."""
        story = self.story
        return story.reference_made and not (story.reference_fault or story.final_sha256 or story.reference_sha256)

    @property
    def passed(self) -> bool:
        return not self.broken

    @property
    def survived(self) -> bool:
        """Whether nothing is broken but the comparison with the uninterrupted run."""
        return not set(self.broken) - set(_weight_faults(self.story, self.exact))

    @property
    def notes(self) -> tuple[str, ...]:
        """What the rehearsal could not try or see of the user's script."""
        story = self.story
        events, planned = story.events_taken, story.events_planned
        if story.example or not events:
            return ()
        ended = f"the training ended after {events} of the scenario's {planned} events: more epochs would try them all"
        unseen = (
            "whether your script loads what it saved is unknown: this machine was too busy to look in time, or the"
            " folder of temporary files keeps no times of access (mounted with noatime?); with TMPDIR set to a folder"
            " that does, the rehearsal sees it"
        )
        is_unseen = not story.sees_reads and story.reports_no_steps
        moves, moves_planned = story.zone_moves, story.zone_moves_planned
        unmoved = f"the volume moved to another zone {moves} of {moves_planned} times: more epochs would try them all"
        is_unmoved = events >= planned and moves is not None and moves < moves_planned
        told = ((events < planned, ended), (is_unmoved, unmoved), (is_unseen, unseen))
        return tuple(note for holds, note in told if holds)

    def to_document(self) -> dict[str, Any]:
        """The JSON object of `--output json`; figures that cannot be known are null."""
        story = self.story
        return {
            "schema_version": SCHEMA_VERSION,
            "job": story.job,
            "run": story.run,
            "scenario": story.scenario,
            "seed": story.seed,
            "outcome": "ok" if self.passed else "failed",
            "survived": self.survived,
            "broken": list(self.broken),
            "notes": list(self.notes),
            **story.end.to_document(),
            "instances": len(story.instances),
            "zones": len({instance.zone for instance in story.instances}),
            "interruptions": story.notices,
            "kills": story.kills,
            "zone_moves": story.zone_moves,
            "events_planned": story.events_planned,
            "events_taken": story.events_taken,
            "steps_total": story.steps_total,
            "steps_redone": self.steps_redone,
            "steps_lost_with_notice": self.steps_lost_with_notice,
            "steps_lost_without_notice": self.steps_lost_without_notice,
            "final_sha256": story.final_sha256,
            "reference_sha256": story.reference_sha256,
            "exact": self.exact,
            "generators_apart": list(story.generators_apart),
            "throttled_calls": story.throttled_calls,
            "webhook": None if story.webhook is None else list(story.webhook),
            "files_lost": sorted({name for lost in story.files_lost for name in lost.files}),
            "timeline": [_rounded(asdict(instance)) for instance in story.instances],
        }


def summarise(story: Story) -> Summary:
    """Figures and broken expectations of `story`."""
    with_notice, without = _lost(story.instances)
    redone = None if with_notice is None or without is None else with_notice + without
    exact = None
    if story.final_sha256 and story.reference_sha256:
        exact = story.final_sha256 == story.reference_sha256
    broken = tuple(_broken(story, with_notice, exact))
    return Summary(story, redone, with_notice, without, exact, broken)


def _lost(instances: Sequence[InstanceStory]) -> tuple[int | None, int | None]:
    """Steps done again after interruptions with notice, and after all other ends; None where nothing counts steps."""
    # One that ended before its first step had nothing to lose.
    stepped = [instance for instance in instances if instance.has_trained and instance.last_step is not None]
    if not stepped:
        return None, None
    with_notice = without = 0
    for before, after in pairwise(stepped):
        if before.last_step is None or after.resumed_step is None:
            return None, None
        lost = max(0, before.last_step - after.resumed_step)
        if before.end == "interrupted":
            with_notice += lost
        else:
            without += lost
    return with_notice, without


def _broken(story: Story, lost_with_notice: int | None, exact: bool | None) -> list[str]:
    """One line an expectation that was not met. A job that did not finish proves nothing further."""
    if story.end.phase != Phase.DONE.value:
        return list(story.end.faults())
    return [
        *story.end.faults(),
        *_leftovers(story.end),
        *_work_lost(story),
        *_scenario_faults(story, lost_with_notice),
        *_weight_faults(story, exact),
        *_untold(story),
    ]


def _leftovers(end: End) -> Iterator[str]:
    if end.volumes_left != 1:
        yield f"{end.volumes_left} volumes are left, not 1"
    if end.snapshots_left > SNAPSHOTS_KEPT:
        yield f"{end.snapshots_left} snapshots are left, more than the {SNAPSHOTS_KEPT} that are kept"


def _work_lost(story: Story) -> Iterator[str]:
    """A script of which nothing survives trains to its end as well as any other, so its end proves nothing."""
    yield from from_nothing(
        Attempt(instance.instance, instance.instance, instance.resumed_step, instance.last_step, instance.saved_step)
        for instance in story.instances
        if instance.has_trained
    )
    if not story.example and story.reports_no_steps:
        yield from story.not_resumed
    yield from map(str, story.files_lost)


def _untold(story: Story) -> Iterator[str]:
    if story.webhook is not None and Phase.DONE.value not in story.webhook:
        yield "the webhook's stand-in was not told that the run is done; `notify` in agent.log says why"


def _has_tried_a_resume(story: Story) -> bool:
    """Whether an event took place, and another machine trained if one was taken away."""
    trained = sum(instance.has_trained for instance in story.instances)
    return story.events_taken > 0 and (trained > 1 or not story.notices + story.kills)


def _untried(story: Story) -> Iterator[str]:
    """Of the example alone: a verdict on a user's script is never about the scenario."""
    if story.events_taken < story.events_planned:
        yield (
            f"only {story.events_taken} of {story.events_planned} events of the scenario took place before the end;"
            " a longer job, or --scenario notice, leaves time for all"
        )
    elif story.zone_moves is not None and story.zone_moves < story.zone_moves_planned:
        yield f"the volume moved to another zone {story.zone_moves} times, not {story.zone_moves_planned}"
    elif story.throttles_planned and not story.throttled_calls:
        yield "no call was throttled, although the scenario throttles"


def _scenario_faults(story: Story, lost_with_notice: int | None) -> Iterator[str]:
    if story.example:
        yield from _untried(story)
    elif story.events_planned and not _has_tried_a_resume(story):
        yield (
            "the training ended before it could be interrupted, so nothing is known of its resume; give it more to do"
            " for a rehearsal (more epochs), or save earlier"
        )
    if lost_with_notice:
        yield f"{lost_with_notice} steps were lost although a notice was given"


def _weight_faults(story: Story, exact: bool | None) -> Iterator[str]:
    if not story.reference_made:
        return
    if story.reference_fault:
        yield f"the uninterrupted run failed, so nothing can be compared: {story.reference_fault}"
    elif exact is None and (story.final_sha256 or story.reference_sha256):
        interrupted, missing = ("the interrupted", "the uninterrupted") if story.final_sha256 else (
            "the uninterrupted", "the interrupted")  # fmt: skip
        yield f"{interrupted} run left weights, {missing} one none: they cannot be compared"
    elif exact is None:
        return  # a trainer without weight files: `Summary.compares_nothing`
    elif not exact:
        apart = f"; these random generators differ too: {', '.join(story.generators_apart)}"
        yield (
            "the final weights differ from those of a run that was never interrupted (is the trainer deterministic,"
            " and does it restore everything: optimizer, data order, random state?)"
            f"{apart if story.generators_apart else ''}"
        )


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()}
