"""The loop: look, decide, say why, act; until the job's volume is mounted here, or it cannot be, or we are stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spotheal.agent.protocol.documents import Claim
from spotheal.agent.protocol.ends import End
from spotheal.agent.protocol.errors import (
    CapacityError,
    Conflict,
    Interrupted,
    NotFound,
    PermissionDenied,
    Retryable,
    SpothealError,
    WaitTimedOut,
)
from spotheal.agent.protocol.retry_budget import Patience
from spotheal.agent.volume.act import act
from spotheal.agent.volume.actions import POLL_SECONDS, Action, GiveUp, Ready, Wait
from spotheal.agent.volume.context import Context
from spotheal.agent.volume.observe import advance, observe, terms
from spotheal.agent.volume.plan import decide
from spotheal.agent.volume.release import leave
from spotheal.agent.volume.seen import Observed

BACKOFF_SECONDS = 1.0
BACKOFF_SECONDS_MAX = 30.0
FAILING_SECONDS_MAX = 30 * 60.0
REPEAT_SECONDS_MAX = 60.0
STORY_LENGTH = 200


@dataclass(frozen=True)
class Held:
    """The volume is mounted here and `term` is ours. `moved_from`: the volume this one was copied from."""

    volume: str
    term: int
    device: str
    mountpoint: str
    moved_from: str | None = None


def left_behind(ctx: Context) -> Held | None:
    """What an earlier life of this agent wrote to, if it ended before its handover did: nobody else has claimed a term
    since, so it is ours to hand over. None also if the store does not answer."""
    try:
        claim, holds, _, _ = terms(ctx)
    except SpothealError as error:
        ctx.log.warning("what an earlier agent left here cannot be known", error=error.message)
        return None
    if claim is None or not _is_of_an_earlier_life(ctx, claim, holds):
        return None
    return Held(holds[claim.number], claim.number, "", ctx.desired.mountpoint)


def _is_of_an_earlier_life(ctx: Context, claim: Claim | None, holds: Mapping[int, str]) -> bool:
    ours = claim is not None and claim.instance == ctx.desired.instance
    return ours and claim is not None and claim.number in holds and claim.number != ctx.memory.took_over


@dataclass
class _Patience:
    """Until when the same wait, or the same fault, is borne."""

    ctx: Context
    waiting: tuple[str, float] = ("", 0.0)
    acted: tuple[object, ...] = ()
    repeats: int = 0
    failures: int = 0
    with_faults: Patience = field(init=False)

    def __post_init__(self) -> None:
        self.with_faults = Patience(self.ctx.clock, FAILING_SECONDS_MAX)

    def waits(self, action: Wait) -> None:
        self.repeats = 0
        moment = self.ctx.clock.monotonic()
        if self.waiting[0] != action.kind:
            self.waiting = (action.kind, moment)
            self.ctx.log.info("waiting", why=action.why)
        elif action.seconds_max is not None and moment - self.waiting[1] > action.seconds_max:
            raise WaitTimedOut(f"{action.why}, for {(moment - self.waiting[1]) / 60:.0f} minutes")

    def acts(self, action: Action) -> None:
        self.waiting = ("", 0.0)
        fingerprint = (type(action), *(value for name, value in vars(action).items() if name != "why"))
        self.repeats = self.repeats + 1 if fingerprint == self.acted else 0
        self.acted = fingerprint
        self.ctx.log.info(
            "healing", action=type(action).__name__, **{k: v for k, v in vars(action).items() if k != "spec"}
        )

    def succeeded(self) -> None:
        """Doing the same again and again is slowed down: what it is to change may take its time to show."""
        self.failures = 0
        self.with_faults.succeeded()
        if self.repeats:
            self.ctx.clock.sleep(min(REPEAT_SECONDS_MAX, POLL_SECONDS * self.repeats), until=self.ctx.stop)

    def failed(self, error: SpothealError) -> None:
        """Sleep before the next try; raises `error` where trying again is hopeless."""
        # A quota is raised, or another run ends: CapacityError passes, too.
        borne = isinstance(error, (Retryable, Conflict, CapacityError, NotFound, PermissionDenied))
        if not borne or self.with_faults.is_over(error):
            raise error
        self.failures += 1
        ceiling = min(BACKOFF_SECONDS_MAX, BACKOFF_SECONDS * 2.0 ** min(self.failures, 8))
        seconds = ceiling * (0.5 + 0.5 * self.ctx.random.random())
        self.ctx.log.warning("trying again", error=error.message, seconds=round(seconds, 1))
        self.ctx.clock.sleep(seconds, until=self.ctx.stop)


def heal(ctx: Context) -> Held | End:
    """The job's volume, mounted here under a term of ours; or the end of the run where it cannot be had.

    Raises Interrupted (after letting go of what was begun) where `ctx.stop` is set, WaitTimedOut where a wait has
    outlasted its limit, and Fatal errors as they come.
    """
    patience = _Patience(ctx)
    term_told: int | None = None
    advanced: Observed | None = None  # what our own last action has made of the last look
    observed: Observed | None = None
    while True:
        ctx.on_round()
        if ctx.stop.is_set():
            # What an earlier life wrote to is handed over, with a snapshot, and not only let go.
            if observed is not None and not _is_of_an_earlier_life(ctx, observed.claim, observed.holds):
                leave(ctx)
            raise Interrupted("healing was stopped; what was begun is let go")
        try:
            observed, advanced = advanced or observe(ctx), None
            if ctx.memory.term is not None and ctx.memory.term != term_told:
                term_told = ctx.memory.term
                ctx.on_term(term_told)
            action = decide(ctx.desired, observed)
            ctx.memory.story = [*ctx.memory.story[1 - STORY_LENGTH :], (observed, action)]
            if isinstance(action, Wait):
                patience.waits(action)
            else:
                patience.acts(action)
            if isinstance(action, Ready):
                return Held(action.volume, action.term, action.device, ctx.desired.mountpoint, action.moved_from)
            if isinstance(action, GiveUp):
                return End(action.phase, action.reason)
            act(action, ctx)
            patience.succeeded()
            advanced = advance(ctx, observed, action)
        except WaitTimedOut:
            raise
        except SpothealError as error:
            patience.failed(error)
