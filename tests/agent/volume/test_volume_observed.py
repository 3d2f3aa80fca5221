"""What healing reads of other machines and of its own mount, held against what really writes it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import torch
from handover_world import FakeClock
from test_volume_ec2 import AT_ONCE, A, launch, spec

from spotheal.agent.aws.ec2 import Ec2
from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import SystemClock, never, rfc3339
from spotheal.agent.protocol.documents import Claim
from spotheal.agent.protocol.names import HEARTBEAT_SECONDS, LAYOUT, StoreUrl
from spotheal.agent.volume.actions import POLL_SECONDS, FenceHolder
from spotheal.agent.volume.context import Context
from spotheal.agent.volume.observe import observe, steps_in
from spotheal.agent.volume.plan import decide
from spotheal.agent.volume.seen import Desired
from spotheal.fleet.rehearsal.ec2.rulebook import Rulebook
from spotheal.fleet.rehearsal.services.client import InMemoryEc2, InMemoryS3
from spotheal.training import checkpoint


def test_the_steps_of_checkpoints_are_read_from_the_names_that_our_stores_give_them(tmp_path: Path) -> None:
    store = checkpoint.Store(tmp_path)
    for step in (7, 120):
        store.save_now(step, {"weight": torch.ones(3)}, best=True)
    store.close()
    (tmp_path / ".step.tmp").touch()
    (tmp_path / "broken-step-000000900.safetensors").touch()
    assert steps_in(os.listdir(tmp_path)) == (7, 120)
    assert steps_in(["step-000000130", "step-000000140-2", "logs", "step-x"]) == (130, 140)  # sets of many ranks


def waiting_beside(skew: float) -> tuple[FakeClock, Context, Store]:
    """An instance whose wall clock is `skew` ahead, another that holds term 1, and what that one's store is."""
    clock, rules = FakeClock(), Rulebook(SystemClock(), zones=(A,), latencies=AT_ONCE)
    clock.skew = skew
    ec2, holder, here = Ec2(InMemoryEc2(rules)), launch(rules), launch(rules)
    ec2.attach(ec2.create_volume(spec()).id, holder, "/dev/sdf")
    store = Store(InMemoryS3("bucket"), StoreUrl("bucket", "digits/r1"))
    clock.skew, skew = 0.0, clock.skew
    store.claim_term(Claim(1, holder, A, rfc3339(clock.now())))
    clock.skew = skew
    host = SimpleNamespace(mounted_at=lambda mountpoint: None, find_device=lambda volume, attached_as: None)
    ctx = Context(
        desired=Desired("r1", here, A, "/dltraining", "xfs", 10, "gp3", {}),
        ec2=ec2,
        store=store,
        host=host,  # type: ignore[arg-type]
        clock=clock,
        stop=never(),
        log=logging.getLogger("waiting"),
        checkpoint_names=lambda mountpoint: (),
    )

    def beat() -> None:
        clock.skew = 0.0
        store.put_json(LAYOUT.status, {"term": 1, "instance": holder, "heartbeat": rfc3339(clock.now())})
        clock.skew = skew

    for number in range(60):  # each beat takes its time on the way
        clock.at(number * (HEARTBEAT_SECONDS + 3.0), beat)
    return clock, ctx, store


def fenced(clock: FakeClock, ctx: Context, until: float) -> float | None:
    """When the holder was to be terminated."""
    while clock.elapsed < until:
        if isinstance(decide(ctx.desired, observe(ctx)), FenceHolder):
            return clock.elapsed
        clock.sleep(POLL_SECONDS)
    return None


def test_a_living_holder_is_not_fenced_by_an_instance_whose_wall_clock_is_an_hour_ahead() -> None:
    clock, ctx, _ = waiting_beside(3600.0)
    assert fenced(clock, ctx, until=1800.0) is None


def test_a_holder_that_falls_silent_is_fenced_within_a_quarter_of_an_hour() -> None:
    clock, ctx, _ = waiting_beside(0.0)
    last = 59 * (HEARTBEAT_SECONDS + 3.0)
    found = fenced(clock, ctx, until=last + 900.0)
    assert found is not None and found - last >= 600.0
