"""status, logs, cancel and --wait: answers from the store alone, for runs of which nothing is left but it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest
from fleet_desk import BUCKET, Desk, desk, moto_clients, wheels

from spotheal.agent.aws.ec2 import Instance, Volume
from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import rfc3339
from spotheal.agent.protocol.errors import ExitCode, JobFailed, WaitTimedOut
from spotheal.agent.protocol.names import LAYOUT, Phase, StoreUrl
from spotheal.agent.record.ledger import Ledger
from spotheal.fleet.run import runs
from spotheal.fleet.run.session import Session
from spotheal.fleet.status import wait
from spotheal.fleet.status.live import Lines
from spotheal.fleet.status.screen import render
from spotheal.fleet.status.status import RunFacts, summarise

__all__ = ["desk", "moto_clients", "wheels"]
NOW = datetime(2026, 11, 21, 12, 0, tzinfo=timezone.utc)


def seen(**changes: Any) -> RunFacts:
    base = RunFacts(
        job="cifar", run="01J8Z3T2QK5V9W7X6Y5Z4A3B2C", store="s3://b/cifar/run",
        status={"phase": "training", "instance": "i-0a", "instance_type": "g5.xlarge", "zone": "us-west-2a",
                "heartbeat": "2026-11-21T11:59:30Z",
                "progress": {"step": 120, "steps_total": 400, "epoch": 1, "loss": 0.31, "samples_per_second": 812.0,
                             "saved": {"step": 100, "path": "x", "time": "2026-11-21T11:58:00Z"}}},
        fleet={"fleet_id": "sfr-1", "requested_at": "2026-11-21T11:00:00Z"},
        launches=({"instance": "i-0a", "time": "2026-11-21T11:01:00Z"},), events=(), fleet_state="active",
        volumes=(), instances=(Instance("i-0a", "running", "us-west-2a", "g5.xlarge", NOW),),
    )  # fmt: skip
    return replace(base, **changes)


# ------------------------------------------------------------------------------------------------------------ summarise
def test_a_training_run_shows_step_rate_and_the_age_of_its_checkpoint() -> None:
    text = render(summarise(seen(), NOW), NOW)
    assert "step 120 of 400 (30 %)" in text
    assert "epoch 1, loss 0.31, 812 samples/s" in text
    assert "step 100, 2 min ago" in text
    assert "i-0a  g5.xlarge us-west-2a, heard 30 s ago" in text


def test_a_new_machine_shows_the_step_that_the_last_one_saved_until_its_trainer_tells_one() -> None:
    healing = {"phase": "healing", "instance": "i-0b", "heartbeat": "2026-11-21T11:59:30Z", "progress": None}
    ends = ({"event": "trainer-ended", "saved_step": 240, "time": "2026-11-21T11:50:00Z"},)
    assert "step 240" in render(summarise(seen(status=healing, events=ends), NOW), NOW)
    started = (*ends, {"event": "trainer-started", "resumed_step": None, "time": "2026-11-21T11:55:00Z"})
    assert summarise(seen(status=healing, events=started), NOW)["progress"]["step"] == 240
    assert summarise(seen(status=healing), NOW)["progress"] is None, "a first machine has saved nothing yet"
    assert summarise(seen(status={**healing, "phase": "failed"}, events=ends), NOW)["progress"] is None


def test_a_rate_needs_the_step_that_the_trainer_began_at() -> None:
    """operator.md 6: 20 steps a second and 9 s left, of a trainer that did 2.5."""
    started = {"event": "trainer-started", "resumed_step": None, "time": "2026-11-21T11:55:00Z"}
    assert summarise(seen(events=(started,)), NOW)["progress"]["steps_per_second"] is None
    resumed = {**started, "event": "trainer-resumed", "resumed_step": 90}
    assert summarise(seen(events=(started, resumed)), NOW)["progress"]["steps_per_second"] is not None


def test_a_silent_holder_is_said_to_be_silent() -> None:
    quiet = seen(status={"phase": "training", "heartbeat": "2026-11-21T11:50:00Z"})
    assert summarise(quiet, NOW)["silent"] is True
    assert "silent" in render(summarise(quiet, NOW), NOW)


def test_a_run_whose_fleet_is_gone_names_the_command_that_goes_on() -> None:
    assert "--resume" in render(summarise(seen(fleet_state="cancelled_terminating"), NOW), NOW)
    assert "--resume" not in render(summarise(seen(fleet_state=None), NOW), NOW)  # nobody answered: nothing is claimed


def test_an_end_shows_its_reason_and_no_instance() -> None:
    ended = seen(status={"phase": "failed", "reason": "exit 1, three times", "instance": "i-0a"}, fleet_state="")
    document = summarise(ended, NOW)
    assert document["ended"] is True
    text = render(document, NOW)
    assert "exit 1, three times" in text
    assert "heard" not in text


def test_interruptions_and_moves_are_counted_from_the_ledger() -> None:
    events = (
        {"event": "notice", "instance": "i-0a"},
        {"event": "volume", "instance": "i-0b", "moved_from": "vol-1", "volume": "vol-2"},
        {"event": "trainer-ended", "instance": "i-0a", "kind": "interrupted", "saved_step": 90},
    )
    document = summarise(seen(events=events), NOW)
    assert (document["interruptions"], document["zone_moves"]) == (1, 1)
    assert document["launches"][0]["outcome"] == "interrupted"
    assert document["launches"][0]["saved_step"] == 90


def test_a_shutdown_of_our_own_is_no_interruption() -> None:
    events = (
        {"event": "notice", "instance": "i-0a", "action": "shutdown"},
        {"event": "trainer-ended", "instance": "i-0a", "kind": "interrupted"},
    )
    document = summarise(seen(events=events), NOW)
    assert 0 == document["interruptions"]
    assert "ended" == document["launches"][0]["outcome"]


@pytest.mark.parametrize("phase, outcome", [("done", "ended"), ("training", "lost")])
def test_a_machine_that_went_with_the_fleet_is_not_lost(phase: str, outcome: str) -> None:
    """Of four machines that trained together the cancel ended two before they had recorded their end."""
    gone = Instance("i-0a", "terminated", "us-west-2a", "g5.xlarge", NOW, state_reason="Client.UserInitiatedShutdown")
    row = summarise(seen(status={"phase": phase}, events=(), instances=(gone,)), NOW)["launches"][0]
    assert outcome == row["outcome"]
    assert ("by a cancel" in row["reason"]) == (outcome == "ended")


@pytest.mark.parametrize("outcome", ["barred", "boot failed"])
def test_a_machine_that_ended_itself_is_shown_with_its_own_reason(outcome: str) -> None:
    launch = {"instance": "i-0a", "time": "2026-11-21T11:01:00Z", "outcome": outcome, "reason": "it has no NVIDIA GPU"}
    gone = Instance("i-0a", "terminated", "us-west-2a", "g5.xlarge", NOW, state_reason="Client.UserInitiatedShutdown")
    row = summarise(seen(launches=(launch,), instances=(gone,)), NOW)["launches"][0]
    assert (outcome, "it has no NVIDIA GPU") == (row["outcome"], row["reason"])


def test_a_store_that_holds_almost_nothing_still_gives_a_screen() -> None:
    bare = seen(status={}, fleet={}, launches=(), fleet_state="", volumes=None, instances=None)
    document = summarise(bare, NOW)
    assert document["phase"] == "requested"
    assert document["volumes"] is None
    assert "none yet" in render(document, NOW)


def test_hostile_text_cannot_steer_the_terminal() -> None:
    hostile = seen(status={"phase": "failed", "reason": "\x1b[2Jgone\nand more"})
    assert "\x1b" not in render(summarise(hostile, NOW), NOW)


def test_the_current_volume_comes_first() -> None:
    def volume(name: str, state: str, term: str) -> Volume:
        return Volume(name, "us-west-2a", "available", 100, tags={"spotheal:state": state, "spotheal:term": term})

    document = summarise(seen(volumes=(volume("vol-1", "superseded", "3"), volume("vol-2", "current", "4"))), NOW)
    text = render(document, NOW)
    assert text.index("vol-2") < text.index("vol-1")


# ---------------------------------------------------------------------------------------------------- against the store
def test_status_follows_a_run_from_request_to_the_end_of_everything(desk: Desk) -> None:
    done = desk.request()
    first = desk.good("status")
    assert (first["phase"], first["run"]) == ("requested", done["run"])
    assert first["fleet"] == {"id": done["fleet_id"], "state": "active", "live": True}
    desk.pass_time(60)
    (young,) = desk.good("status")["launches"]  # launched, and not yet come as far as the store
    assert (young["instance"], young["outcome"]) == (desk.account.rules.instances()[0].id, None)
    desk.end(done["run"], Phase.DONE)
    desk.pass_time(72 * 3600)  # by now AWS has forgotten the fleet and its instances
    last = desk.good("status", "cifar")
    assert (last["phase"], last["reason"], last["ended"]) == ("done", "because", True)
    assert last["fleet"]["live"] is False


def test_an_unknown_job_is_not_found_and_says_what_to_check(desk: Desk) -> None:
    for verb in ("status", "logs", "cancel"):
        result = desk.run(verb, "nobody", "--region", "us-west-2")
        assert result.exit_code == ExitCode.NOT_FOUND
        assert "--region" in result.stderr


def test_the_calls_of_status_do_not_grow_with_the_account(desk: Desk) -> None:
    desk.request()
    desk.account.calls = 0
    desk.good("status")
    alone = desk.account.calls
    for number in range(30):
        desk.s3.put_object(Bucket=BUCKET, Key=f"other-{number}/01J8Z3T2QK5V9W7X6Y5Z4A3B2C/status.json", Body=b"{}")
        desk.account.create_volume(AvailabilityZone="us-west-2a", Size=1)
    desk.account.calls = 0
    desk.good("status")
    assert desk.account.calls == alone


def write_logs(store: Store) -> None:
    for number, instance in enumerate(("i-0b", "i-0a")):  # launched in this order
        store.count_launch(instance, {"time": rfc3339(NOW.replace(minute=number))})
        event = {"timestamp": "2026-11-21T12:00:00Z", "level": "info", "event": "attached", "volume": "vol-1"}
        store.put_bytes(LAYOUT.agent_log(instance, 0), (json.dumps(event) + "\n").encode())
        store.put_bytes(LAYOUT.trainer_log(instance, 0), f"step of {instance}\nhalf a li".encode())


def test_logs_of_all_instances_come_in_the_order_of_their_launch(desk: Desk) -> None:
    done = desk.request()
    write_logs(desk.store(done["run"]))
    result = desk.run("logs")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "2026-11-21 12:00:00 info    attached  volume=vol-1",
        "trainer | step of i-0b",
        "2026-11-21 12:00:00 info    attached  volume=vol-1",
        "trainer | step of i-0a",
    ]
    assert result.stderr.splitlines() == ["== i-0b", "== i-0a"]


def test_logs_can_be_of_one_instance_source_or_attempt(desk: Desk) -> None:
    done = desk.request()
    store = desk.store(done["run"])
    write_logs(store)
    ledger = Ledger(store, desk.account.clock, "i-0a", "us-west-2a")
    ledger.add("trainer-started", attempt=2, resumed_step=5)
    assert desk.run("logs", "--instance", "i-0b", "--source", "trainer").stdout == "trainer | step of i-0b\n"
    assert "i-0a" in desk.run("logs", "--attempt", "2").stdout
    for wrong in (["--attempt", "7"], ["--instance", "i-0c"]):
        result = desk.run("logs", *wrong)
        assert result.exit_code == ExitCode.NOT_FOUND
        assert "next: " in result.stderr


def test_following_logs_gives_each_line_once_across_replacements_and_ends_with_the_run(desk: Desk) -> None:
    from spotheal.fleet.logs.logs import Reader

    done = desk.request()
    store = desk.store(done["run"])
    store.put_bytes(LAYOUT.trainer_log("i-0a", 0), b"one\ntw")

    class Story(type(desk.account.clock)):  # type: ignore[misc]
        def sleep(self, seconds: float, until: Any = None) -> bool:
            self.seconds += seconds
            if self.seconds < 6:
                store.put_bytes(LAYOUT.trainer_log("i-0a", 0), b"one\ntwo\nthree\n")
            else:
                store.put_bytes(LAYOUT.trainer_log("i-0b", 0), b"four\n")
                store.write_status({"phase": "done"})
            return False

    run = runs.open_run(desk.s3, StoreUrl(BUCKET, ""), "cifar", done["run"])
    lines = [(line.instance, line.text) for line in Reader(run, source="trainer").follow(Story())]
    assert lines == [("i-0a", "one"), ("i-0a", "two"), ("i-0a", "three"), ("i-0b", "four")]


# --------------------------------------------------------------------------------------------------------------- cancel
def test_cancel_ends_this_runs_fleet_alone_and_keeps_the_volume(desk: Desk) -> None:
    done = desk.request()
    job = desk.folder / "job.toml"
    job.write_text(job.read_text().replace('"cifar"', '"other"') + '[volume]\nname = "other"\n')
    desk.request()
    desk.pass_time(60)
    result = desk.good("cancel", "cifar", "--yes")
    assert result["fleet_id"] == done["fleet_id"]
    assert result["volumes_kept"] == [done["volume_id"]]
    assert len(desk.live_fleets()) == 1
    desk.pass_time(60)
    assert desk.account.rules.volume(done["volume_id"]) is not None
    again = desk.good("cancel", "cifar", "--yes")
    assert again["cancelled"] is False
    assert again["instances"] == []
    assert desk.good("status", "cifar")["reason"].startswith("cancelled by fleetctl")


def test_cancel_ends_instances_that_a_fleet_cancelled_by_other_means_left_running(desk: Desk) -> None:
    done = desk.request()
    desk.pass_time(60)
    desk.account.cancel_spot_fleet_requests(SpotFleetRequestIds=[done["fleet_id"]], TerminateInstances=False)
    (instance,) = desk.account.rules.instances()
    result = desk.good("cancel", "--yes")
    assert (result["fleet_id"], result["instances"]) == (None, [instance.id])
    desk.pass_time(60)
    assert [one.state for one in desk.account.rules.instances()] == ["terminated"]


def test_cancel_asks_and_without_a_terminal_needs_yes(desk: Desk) -> None:
    done = desk.request()
    result = desk.run("cancel")
    assert result.exit_code == ExitCode.USAGE
    assert done["fleet_id"] in result.stderr  # what it would do was shown
    assert len(desk.live_fleets()) == 1


@pytest.mark.parametrize("tags", ["another run's", "none"])
def test_a_fleet_that_does_not_carry_the_runs_tags_is_left_alone(desk: Desk, tags: str) -> None:
    """Its id is in the store: who may write there could name any fleet of the account."""
    desk.request()
    job = desk.folder / "job.toml"
    job.write_text(job.read_text().replace('"cifar"', '"other"') + '[volume]\nname = "other"\n')
    other = desk.request()
    if tags == "none":
        fleets = desk.account.rules.world.fleets
        fleets.put(replace(fleets.get(other["fleet_id"]), tags={}))
    mine = desk.good("status", "cifar")["run"]
    store = desk.store(mine)
    store.put_json(LAYOUT.fleet_document, {"fleet_id": other["fleet_id"]})
    result = desk.run("cancel", "cifar", "--yes", "--region", "us-west-2")
    assert result.exit_code == ExitCode.CONFLICT
    assert len(desk.live_fleets()) == 2


# ----------------------------------------------------------------------------------------------------------------- wait
def followed(desk: Desk, run: str, seconds_max: float | None, *then: dict[str, Any]) -> list[str]:
    """What --wait says while the store shows `then`, one after another."""
    said: list[str] = []
    rest = list(then)
    store = desk.store(run)

    class Story(type(desk.account.clock)):  # type: ignore[misc]
        def sleep(self, seconds: float, until: Any = None) -> bool:
            self.seconds += seconds
            if rest:
                store.write_status({**(store.read_status() or {}), **rest.pop(0)})
            return False

    found = runs.open_run(desk.s3, StoreUrl(BUCKET, ""), "cifar", run)
    try:
        clock = Story()
        wait.wait(Session("us-west-2"), found, clock, Lines(said.append, clock), seconds_max)
    except (JobFailed, WaitTimedOut) as error:
        said.append(f"{int(error.exit_code)} {error.message}")
    return said


def test_waiting_says_what_changes_and_ends_with_the_run(desk: Desk) -> None:
    done = desk.request()
    training = {"phase": "training", "instance": "i-0a", "zone": "us-west-2a", "progress": {"step": 3, "loss": 0.5}}
    said = followed(desk, done["run"], None, training, {"phase": "done"})
    assert said == [
        "requested, no instance yet",
        "training on i-0a (us-west-2a), step 3, loss 0.5",
        "done on i-0a (us-west-2a), step 3, loss 0.5",
    ]


@pytest.mark.parametrize("phase", ["failed", "parked", "limit", "set-up failed"])
def test_waiting_for_a_run_that_fails_is_exit_7_with_the_reason(desk: Desk, phase: str) -> None:
    done = desk.request()
    said = followed(desk, done["run"], None, {"phase": phase, "reason": "no luck"})
    assert said[-1] == f"7 the run ended: {phase}: no luck"


def test_waiting_longer_than_the_timeout_is_exit_6_and_the_run_goes_on(desk: Desk) -> None:
    done = desk.request()
    assert followed(desk, done["run"], 20.0)[-1].startswith("6 ")
    assert len(desk.live_fleets()) == 1


def test_waiting_notices_a_fleet_that_was_ended_by_hand(desk: Desk) -> None:
    done = desk.request()
    desk.account.cancel_spot_fleet_requests(SpotFleetRequestIds=[done["fleet_id"]], TerminateInstances=True)
    assert followed(desk, done["run"], None)[-1].startswith(f"7 the fleet {done['fleet_id']} is cancelled")
