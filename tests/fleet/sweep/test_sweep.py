"""`fleetctl sweep`: the list, the plan, what the store says of the runs, and more or fewer instances."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fleet_desk import BUCKET, Desk, HandClock, desk, moto_clients, wheels

from spotheal.agent.protocol.clock import SystemClock
from spotheal.agent.protocol.errors import ConfigError, ExitCode, WaitTimedOut
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.names import LAYOUT, TAG_RUN, Phase, StoreUrl
from spotheal.agent.record.ledger import read_events
from spotheal.agent.sweep.queue import Entry, Queue, choose
from spotheal.agent.sweep.worker import entry_of
from spotheal.fleet.run.runs import open_run
from spotheal.fleet.run.session import Session
from spotheal.fleet.sweep import entries, progress
from spotheal.fleet.sweep.following import follow

__all__ = ["desk", "moto_clients", "wheels"]
LIST = (Path(__file__).resolve().parents[3] / "examples" / "hyperparam_list.yml").read_text()


# ------------------------------------------------------------------------------------------------------------- the list
def test_the_articles_list_is_read_unchanged() -> None:
    first, second = entries.parse(LIST, "list.yml")
    assert first["hidden_nodes"] == [10, 20, 30]
    assert second == {"batch_size": 128, "epochs": 20, "hidden_nodes": [30, 50, 70], "dropout_rate": 0.7,
                      "activate_fn": "tanh", "optimizer": "rmsprop"}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("[]", "the list has no entry"),
        ("batch_size: 128", "must be a list of entries, and is a mapping"),
        ("just text", "is a text"),
        ("- a: 1\n- 7\n", "entry 1: must be a mapping of names to values, and is a number"),
        ("- {a: [1, 2}\n", ":1:"),
        ("- {1: a}\n", "entry 0: the name 1 must be text"),
        ("- {a: .nan}\n", "entry 0: a: must be numbers"),
        ("- {a: 2026-01-01}\n", "entry 0: a: must be numbers"),
        ("- !!python/object/apply:os.system ['true']\n", "is no YAML"),
        ("- {a: 1}\n" * 10_001, "at most 10000"),
    ],
)
def test_a_list_that_is_none_is_refused_with_its_place(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        entries.parse(text, "list.yml")
    assert "list.yml" in caught.value.message
    assert said in caught.value.message


def test_a_name_that_one_entry_alone_has_is_pointed_out() -> None:
    found = entries.uneven([{"lr": 1}, {"lr": 2}, {"lr": 3, "droput": 0.1}])
    assert found == ["'droput': only entry 2 has it"]
    assert entries.uneven([{"lr": 1, "d": 1}, {"lr": 2, "d": 1}, {"lr": 3}]) == ["'d': all but entry 2 have it"]


def test_what_the_example_trainer_would_refuse_is_refused_before_anything_is_sent(desk: Desk) -> None:
    job = (desk.folder / "job.toml").read_text()
    (desk.folder / "list.yml").write_text("- {hiden_nodes: [10]}\n- {dropout_rate: 1.5, lr: 0.1}\n")
    assert desk.run("sweep", "run", "list.yml", "--dry-run").exit_code == ExitCode.OK, "another trainer may know them"
    (desk.folder / "job.toml").write_text(job.replace('"train.py"', '"-m", "spotheal.training"'))
    refused = desk.run("sweep", "run", "list.yml", "--yes")
    assert refused.exit_code == ExitCode.USAGE
    assert "list.yml: entry 0: hiden_nodes: is not known; the trainer knows hidden_nodes," in refused.stderr
    assert "list.yml: entry 1: dropout_rate: must be a number from 0 to below 1, and is 1.5" in refused.stderr
    assert desk.live_fleets() == []


# ---------------------------------------------------------------------------------------------------------- the request
def sweep(desk: Desk, *more: str) -> dict[str, Any]:
    (desk.folder / "list.yml").write_text(LIST)
    return desk.good("sweep", "run", "list.yml", "--yes", *more)


def test_a_sweep_is_one_fleet_with_a_list_in_the_store_and_no_volume_yet(desk: Desk) -> None:
    done = sweep(desk, "--parallel", "8")
    (fleet,) = desk.live_fleets()
    assert fleet.target == 2, "never more instances than runs"
    store = desk.store(done["run"])
    assert (store.get_json(LAYOUT.sweep) or {})["entries"] == entries.parse(LIST, "list.yml")
    assert desk.volumes() == []
    job = store.get_json(LAYOUT.job_document) or {}
    config = InstanceConfig.from_json(json.dumps(job))
    assert config.entries == 2
    one = entry_of(config, 1)
    assert (one.index, one.entries, one.run) == (1, 0, f"{done['run']}00001")
    assert str(one.store) == f"{config.store}/entries/00001"


def test_a_fleet_that_counts_units_is_refused_where_machines_are_counted(desk: Desk) -> None:
    """`--parallel 8` with weights of 4 would be two machines, and nobody would say so."""
    path = desk.folder / "spot_fleet_config.json"
    whole = json.loads(path.read_text())
    for place in whole.get("SpotFleetRequestConfig", whole)["LaunchSpecifications"]:
        place["WeightedCapacity"] = 4
    path.write_text(json.dumps(whole))
    (desk.folder / "list.yml").write_text(LIST)
    refused = desk.run("sweep", "run", "list.yml", "--yes", "--parallel", "2")
    assert refused.exit_code == ExitCode.USAGE and "WeightedCapacity counts units" in refused.stderr
    assert desk.live_fleets() == []


def test_the_plan_says_what_the_volumes_are_and_status_counts_the_runs(desk: Desk) -> None:
    (desk.folder / "list.yml").write_text(LIST)
    looked = desk.run("sweep", "run", "list.yml", "--dry-run", "--parallel", "2")
    assert "write the list of 2 runs; each has a volume (100 GiB gp3) while it runs, up to 2 at once" in looked.stderr
    assert "$0.022 an hour for 2 at once, $8.00 a month each" in looked.stderr
    assert "for 1 to 2 machines" in looked.stderr
    done = sweep(desk)
    store = desk.store(done["run"])
    store.put_json(LAYOUT.queue_claim(0, 1), {"instance": "i-1", "time": "2026-11-21T00:00:00Z"})
    store.put_json(LAYOUT.queue_ended(0, True), {})
    store.put_json(LAYOUT.queue_claim(1, 1), {"instance": "i-1", "time": "2026-11-21T00:00:00Z"})
    told = {"step": 5, "loss": 0.4, "metrics": {"accuracy": 0.9}}
    store.put_json(f"{LAYOUT.entry(0)}/status.json", {"phase": "done", "progress": told})
    store.put_json(f"{LAYOUT.entry(1)}/status.json", {"phase": "training", "progress": {**told, "loss": 0.2}})
    seen = desk.good("sweep", "status")
    assert seen["runs"] == {"all": 2, "done": 1, "failed": 0, "running": 1, "waiting": 0}
    assert desk.run("sweep", "status").exit_code == ExitCode.OK
    best = desk.good("sweep", "report", "--metric", "loss")["entries"]
    assert [row["index"] for row in best] == [1, 0]
    refused = desk.run("sweep", "report", "--metric", "f1")
    assert refused.exit_code == ExitCode.USAGE
    assert "accuracy, loss" in refused.stderr


def test_the_same_sweep_again_is_shown_and_another_list_is_not_mixed_in(desk: Desk) -> None:
    done = sweep(desk)
    assert sweep(desk)["run"] == done["run"]
    assert len(desk.live_fleets()) == 1
    (desk.folder / "list.yml").write_text("- {lr: 1}\n")
    at_work = desk.run("sweep", "run", "list.yml", "--yes")
    assert at_work.exit_code == ExitCode.CONFLICT and "is not the list that run" in at_work.stderr
    desk.end(done["run"], Phase.FAILED)
    refused = desk.run("sweep", "run", "list.yml", "--yes", "--resume")
    assert refused.exit_code == ExitCode.CONFLICT
    assert "is not the list that run" in refused.stderr


def test_scale_changes_the_fleet_and_never_beyond_what_is_left(desk: Desk) -> None:
    sweep(desk)
    assert desk.good("sweep", "scale", "cifar", "9")["instances"] == 2
    assert desk.live_fleets()[0].target == 2
    assert desk.good("sweep", "scale", "cifar", "1", "--yes")["instances"] == 1
    assert desk.live_fleets()[0].target == 1


def test_no_fleet_but_the_sweeps_own_is_scaled_or_enlarged(desk: Desk) -> None:
    """Its id is in the store: who may write there could name the fleet of another job."""
    run = sweep(desk)["run"]
    over(desk, run, 1, Phase.FAILED)
    (fleet,) = desk.live_fleets()
    desk.account.rules.world.fleets.put(replace(fleet, tags={**fleet.tags, TAG_RUN: "01J8Z3T2QK5V9W7X6Y5Z4A3B2C"}))
    for verb in (("scale", "cifar", "1", "--yes"), ("retry", "cifar")):
        assert desk.run("sweep", *verb).exit_code == ExitCode.CONFLICT, verb
    assert desk.live_fleets()[0].target == fleet.target


def over(desk: Desk, run: str, index: int, phase: Phase, claims: int = 1) -> None:
    """What an instance leaves of a run that ended."""
    store = desk.store(run)
    store.put_json(LAYOUT.queue_claim(index, claims), {"instance": "i-1", "time": "2026-11-21T00:00:00Z"})
    store.put_json(f"{LAYOUT.entry(index)}/status.json", {
        "phase": phase.value, "reason": "the trainer exited with 1", "instance": "i-1", "progress": {"step": 5}})
    store.put_json(LAYOUT.queue_ended(index, phase is Phase.DONE), {"instance": "i-1", "reason": "x"})  # fmt: skip


def test_a_run_that_failed_is_given_back_to_any_instance_and_waits_with_its_steps(desk: Desk) -> None:
    run = sweep(desk, "--parallel", "2")["run"]
    over(desk, run, 0, Phase.DONE)
    over(desk, run, 1, Phase.FAILED)
    desk.good("sweep", "scale", "cifar", "1", "--yes")
    assert desk.good("sweep", "retry", "cifar", "1")["begun_again"] == [1]
    seen = desk.good("sweep", "status")
    assert seen["runs"] == {"all": 2, "done": 1, "failed": 0, "running": 0, "waiting": 1}
    assert seen["entries"][1]["step"] == 5
    queue = Queue(desk.store(run), 2, "i-2", desk.account.clock)
    assert [(entry.claims, entry.holder, entry.ended) for entry in queue.look()] == [(1, "", "done"), (1, "", "")]
    assert [entry.index for entry in choose(queue.look(), "i-2", set())] == [1]


def test_instances_that_left_for_want_of_work_come_back_for_a_run_that_begins_again(desk: Desk) -> None:
    run = sweep(desk, "--parallel", "2")["run"]
    over(desk, run, 1, Phase.FAILED)
    desk.store(run).put_json(LAYOUT.queue_claim(0, 1), {"instance": "i-1", "time": "2026-11-21T00:00:00Z"})
    desk.good("sweep", "scale", "cifar", "1", "--yes")
    assert desk.live_fleets()[0].target == 1
    desk.good("sweep", "retry", "cifar")
    assert desk.live_fleets()[0].target == 2, "one trains, one begins again"


def test_a_cancel_ends_the_ledger_of_each_run_at_work_and_a_resume_goes_on_with_it(desk: Desk) -> None:
    """The cost of a run of a cancelled sweep grew for ever: only the sweep's own ledger had an end."""
    run = sweep(desk, "--parallel", "2")["run"]
    over(desk, run, 0, Phase.DONE)
    desk.store(run).put_json(LAYOUT.queue_claim(1, 1), {"instance": "i-1", "time": "2026-11-21T00:00:00Z"})
    saved = {"phase": "training", "instance": "i-1", "progress": {"step": 9, "saved": {"step": 7}}}
    desk.store(run).put_json(f"{LAYOUT.entry(1)}/{LAYOUT.status}", saved)
    for _ in range(2):
        desk.good("cancel", "--yes")
    done, ended = (
        read_events((desk.store(run).get_bytes(f"{LAYOUT.entry(index)}/{LAYOUT.ledger}") or b"").decode())
        for index in (0, 1)
    )
    assert done == []
    assert [(one["event"], one["phase"], one["saved_step"]) for one in ended] == [("end", "cancelled", 7)]
    sweep(desk, "--resume")
    assert (desk.good("sweep", "status")["entries"][1]["state"], desk.live_fleets()[0].target) == ("running", 1)


def test_only_runs_that_failed_are_begun_again(desk: Desk) -> None:
    run = sweep(desk)["run"]
    over(desk, run, 0, Phase.DONE)
    for given, code, said in ((["0"], ExitCode.CONFLICT, "run 0 is done"),
                              (["1"], ExitCode.CONFLICT, "run 1 is waiting"),
                              (["7"], ExitCode.NOT_FOUND, "the sweep has 2, 0 to 1"),
                              ([], ExitCode.CONFLICT, "no run of this sweep has failed"),
                              (["x"], ExitCode.USAGE, "valid integer")):  # fmt: skip
        refused = desk.run("sweep", "retry", "cifar", *given)
        assert (refused.exit_code, said in refused.stderr) == (code, True), refused.stderr


def test_a_sweep_that_ended_with_failures_goes_on_with_them_under_a_new_fleet(desk: Desk) -> None:
    run = sweep(desk)["run"]
    over(desk, run, 0, Phase.DONE)
    over(desk, run, 1, Phase.FAILED, claims=3)
    desk.end(run, Phase.FAILED)
    assert "--retry-failed" in desk.run("sweep", "retry", "cifar").stderr
    refused = desk.run("sweep", "run", "list.yml", "--yes", "--resume")
    assert refused.exit_code == ExitCode.CONFLICT
    assert "every run of sweep" in refused.stderr and "1 done, 1 failed" in refused.stderr
    again = sweep(desk, "--retry-failed", "--parallel", "2")
    assert again["run"] == run
    assert desk.live_fleets()[0].target == 1, "one run is left"
    seen = desk.good("sweep", "status")
    assert (seen["phase"], seen["runs"]["waiting"], seen["runs"]["failed"]) == ("training", 1, 0)


def test_a_sweep_with_a_run_that_failed_ends_the_wait_with_exit_code_7_and_names_it(desk: Desk) -> None:
    run = sweep(desk)["run"]
    over(desk, run, 0, Phase.DONE)
    over(desk, run, 1, Phase.FAILED)
    status = desk.store(run).read_status() or {}
    ended = {**status, "phase": "failed", "reason": "1 of 2 runs are done; failed: 1"}
    desk.store(run).write_status(ended)
    waited = desk.run("sweep", "run", "list.yml", "--yes", "--wait")
    assert waited.exit_code == ExitCode.JOB_FAILED
    assert "the sweep ended: failed: 1 of 2 runs are done; failed: 1" in waited.stderr
    assert "--retry-failed" in waited.stderr


def test_a_timeout_shorter_than_the_time_between_two_looks_ends_the_wait_then(desk: Desk) -> None:
    found = open_run(desk.s3, StoreUrl(BUCKET, ""), "cifar", sweep(desk)["run"])
    clock = HandClock()
    with pytest.raises(WaitTimedOut):
        follow(Session("us-west-2"), found, clock, lambda _: None, 20.0)
    assert clock.seconds == 20.0


def test_following_a_sweep_tells_each_minute_how_far_its_runs_are_and_ctrl_c_leaves_it_going_on(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sweep(desk, "--parallel", "2")["run"]
    desk.store(run).put_json(LAYOUT.queue_claim(1, 1), {"instance": "i-1", "time": "2026-11-21T00:00:00Z"})
    desk.store(run).put_json(f"{LAYOUT.entry(1)}/status.json", {
        "phase": "training", "instance": "i-1", "progress": {"step": 40, "steps_total": 100}})  # fmt: skip
    looks, real = 0, SystemClock.sleep

    def sleep(clock: Any, seconds: float, until: Any = None) -> bool:
        nonlocal looks
        if threading.current_thread() is not threading.main_thread():  # one that another test has left
            return real(clock, seconds, until)
        desk.account.clock.seconds += seconds
        looks += 1
        if looks == 9:
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(SystemClock, "sleep", sleep)
    monkeypatch.setattr(SystemClock, "monotonic", lambda clock: desk.account.clock.seconds)
    watched = desk.run("sweep", "status", "-w")
    assert watched.exit_code == ExitCode.INTERRUPTED
    assert watched.stderr.count("0 of 2 done, 1 running, 1 waiting; run 1 at step 40/100\n") == 3
    assert "the sweep goes on: `fleetctl sweep status -w cifar` looks again" in watched.stderr


def test_a_row_is_cut_where_the_terminal_ends_and_shows_first_what_differs() -> None:
    nothing = {"state": "waiting", "step": None, "steps_total": None, "loss": None, "metrics": {}, "instances": 0}
    rows = [{"index": index, **nothing, "parameters": {"alike": "x" * 60, "own": index}} for index in range(2)]
    count = {"all": 2, "done": 0, "running": 0, "waiting": 2, "failed": 0}
    document = {"job": "j", "run": "r", "phase": "requested", "reason": "", "runs": count, "entries": rows,
                "store": "s", "fleet": {"id": "", "state": ""}}  # fmt: skip
    shown = progress.render(document, width=80).splitlines()[-2:]
    assert [len(line) for line in shown] == [80, 80] and all(line.endswith("x…") for line in shown)
    assert "own=1, alike=xxx" in shown[1]


def test_a_sweep_that_gets_no_instances_says_why(desk: Desk) -> None:
    desk.account.rules.no_capacity(["us-west-2a", "us-west-2b"], 3600)
    run = sweep(desk, "--parallel", "2")["run"]
    fleet = desk.store(run).get_json(LAYOUT.fleet_document) or {}
    begun = desk.account.clock.now().isoformat()  # by the clock of the desk's AWS
    desk.store(run).put_json(LAYOUT.fleet_document, {**fleet, "requested_at": begun})
    desk.pass_time(600)
    assert desk.good("sweep", "status")["no_capacity"]["cause"] == "capacity"
    shown = desk.run("sweep", "status").stdout
    assert "no spot capacity since" in shown and "`fleetctl sweep run LIST --resume`" in shown


def test_why_a_run_failed_is_told_in_full_and_never_steers_the_terminal(desk: Desk) -> None:
    run = sweep(desk)["run"]
    over(desk, run, 1, Phase.FAILED)
    path = f"{LAYOUT.entry(1)}/status.json"
    told = desk.store(run).get_json(path) or {}
    lines = [f"line {number}" for number in range(20)]
    reason = "\n".join(["the trainer failed 3 times: exit code 1", *lines, "ValueError: \x1b[2J"])
    desk.store(run).put_json(path, {**told, "reason": reason})
    shown = desk.run("sweep", "status").stdout
    assert "run 1 failed: the trainer failed 3 times: exit code 1\n  …\n" in shown
    assert "line 19\n  ValueError: " in shown
    assert "\x1b" not in shown and "line 3" not in shown


def test_a_job_that_is_no_sweep_is_named_so(desk: Desk) -> None:
    desk.request()
    refused = desk.run("sweep", "status")
    assert refused.exit_code == ExitCode.NOT_FOUND
    assert "is no sweep" in refused.stderr


# ------------------------------------------------------------------------------------------------------------ the queue
def test_an_instance_takes_its_own_first_then_lost_ones_then_new_ones_then_silent_ones() -> None:
    all_of_them = [
        Entry(0, 1, "i-alive", "1"), Entry(1, 1, "i-done", "1", "done"), Entry(2), Entry(3, 1, "i-gone", "2"),
        Entry(4, 2, "i-gone", "1"), Entry(5, 1, "i-me", "1"), Entry(6, 1, "i-silent", "1"),
    ]  # fmt: skip
    found = choose(all_of_them, "i-me", {"i-gone"}, {6})
    assert [entry.index for entry in found] == [5, 4, 3, 2, 6]
    assert choose([Entry(0, 1, "i-alive", "1")], "i-me", set()) == []


def test_runs_are_sorted_by_a_metric_and_those_without_it_come_last() -> None:
    rows = [{"index": 0, "loss": None, "metrics": {}}, {"index": 1, "loss": 0.5, "metrics": {"acc": 0.5}},
            {"index": 2, "loss": 0.1, "metrics": {"acc": 0.9}}]  # fmt: skip
    assert [row["index"] for row in progress.by_metric(rows, "acc", smallest=False)] == [2, 1, 0]
    assert [row["index"] for row in progress.by_metric(rows, "loss", smallest=True)] == [2, 1, 0]
    rows[1]["loss"] = float("nan")  # compared with any other it is neither, and would break the order of all
    assert [row["index"] for row in progress.by_metric(rows, "loss", smallest=True)] == [2, 0, 1]




@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        ("s3://no-such-bucket-of-ours/list.yml", ExitCode.NOT_FOUND, "no-such-bucket-of-ours"),
        ("s3://{bucket}/none.yml", ExitCode.NOT_FOUND, "none.yml"),
        ("s3://{bucket}", ExitCode.USAGE, "names no object"),
        ("s3://{bucket}/", ExitCode.USAGE, "names no object"),
        ("s3:///list.yml", ExitCode.USAGE, "no name of a bucket"),
        ("fifo", ExitCode.USAGE, "is a pipe that may never end"),
        ("none.yml", ExitCode.NOT_FOUND, "there is no none.yml"),
        (".", ExitCode.USAGE, "cannot be read"),
    ],
)
def test_a_list_that_is_not_there_is_one_line_and_nothing_is_sent(
    desk: Desk, source: str, code: ExitCode, said: str
) -> None:
    desk.s3.create_bucket(Bucket="lists", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    os.mkfifo(desk.folder / "fifo")
    refused = desk.run("sweep", "run", source.format(bucket="lists"), "--yes")
    assert (refused.exit_code, said in refused.stderr) == (code, True), refused.stderr
    assert "Traceback" not in refused.stderr
    assert desk.live_fleets() == []


def test_a_list_in_s3_is_read_and_a_single_entry_is_a_sweep_too(desk: Desk) -> None:
    desk.s3.create_bucket(Bucket="lists", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    desk.s3.put_object(Bucket="lists", Key="a=1/b c.yml", Body=b"- {lr: 0.1}\n")
    done = desk.good("sweep", "run", "s3://lists/a=1/b c.yml", "--yes", "--parallel", "5")
    assert desk.live_fleets()[0].target == 1
    assert (desk.store(done["run"]).get_json(LAYOUT.sweep) or {})["source"] == "s3://lists/a=1/b c.yml"


def test_clean_keeps_what_a_failed_run_left_until_it_is_given_up(desk: Desk) -> None:
    run = sweep(desk)["run"]
    over(desk, run, 0, Phase.DONE)
    over(desk, run, 1, Phase.FAILED)
    ec2 = desk.account
    for index in (0, 1):
        tags = {"spotheal:job": "cifar", "spotheal:run": f"{run}{index:05d}", "spotheal:state": "current"}
        listed = [{"Key": key, "Value": value} for key, value in tags.items()]
        ec2.create_volume(AvailabilityZone="us-west-2a", Size=10, VolumeType="gp3",
                          TagSpecifications=[{"ResourceType": "volume", "Tags": listed}])  # fmt: skip
    desk.store(run).put_bytes(f"{LAYOUT.results}0/model/model.safetensors", b"weights")
    desk.pass_time(60)
    kept = desk.run("clean", "cifar", "--yes").output
    assert len(desk.volumes()) == 2 and "an instance of its run is there" in kept
    desk.end(run, Phase.FAILED)
    desk.pass_time(3600)
    told = desk.run("clean", "cifar", "--yes")
    assert told.exit_code == ExitCode.OK, told.output
    desk.pass_time(60)
    assert [volume.tags["spotheal:run"] for volume in desk.volumes()] == [f"{run}00001"], told.output
    assert "`fleetctl sweep run LIST --retry-failed`; --unfinished gives it up" in told.output
    desk.good("clean", "cifar", "--yes", "--unfinished")
    desk.pass_time(60)
    assert desk.volumes() == []
