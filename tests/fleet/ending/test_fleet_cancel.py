"""`cancel --save` and `request --replace`: the run saves a last checkpoint and ends itself; no step is lost."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import structlog
from agent_world import AgentWorld
from fleet_desk import BUCKET, Desk, desk, moto_clients, wheels

from spotheal.agent.aws.ec2 import Ec2
from spotheal.agent.protocol.clock import Stop, rfc3339
from spotheal.agent.protocol.errors import ExitCode, WaitTimedOut
from spotheal.agent.protocol.names import LAYOUT, Phase
from spotheal.agent.record import status
from spotheal.fleet.ending import stopping
from spotheal.fleet.run.runs import REPLACED, Run
from spotheal.fleet.verbs.cancel import remains

__all__ = ["desk", "moto_clients", "wheels"]
COUNTING = """
import json, os, signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
folder, progress = os.environ["SPOTHEAL_CHECKPOINT_DIR"], os.environ["SPOTHEAL_PROGRESS_FILE"]
step = max([int(n.split("-")[1]) for n in os.listdir(folder) if n.startswith("step-")], default=0)
saved = step
def tell():
    with open(progress + ".tmp", "w") as f:
        json.dump({"step": step, "saved": {"step": saved, "path": "", "time": ""}}, f)
    os.replace(progress + ".tmp", progress)
while not told:
    step += 1
    if step % 1000 == 0:
        saved = step
    tell()
    time.sleep(0.05)
open(f"{folder}/step-{step}", "w").write("x")
saved = step
tell()
sys.exit(75)
"""


class Session:
    """What of `session.Session` stopping needs, over the world of one agent."""

    def __init__(self, world: AgentWorld) -> None:
        self._client = world.operator
        self.ec2 = Ec2(world.operator)

    def client(self, _: str) -> Any:
        return self._client


@pytest.fixture
def restore_structlog() -> Any:
    yield
    structlog.reset_defaults()


def test_the_step_that_was_done_when_it_was_asked_is_the_step_that_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restore_structlog: None
) -> None:
    """The real agent, and a trainer that by itself would save at step 1000 for the first time."""
    monkeypatch.setattr(status, "PUBLISH_SECONDS_MIN", 0.2)
    monkeypatch.setattr(stopping, "POLL_SECONDS", 0.1)
    world = AgentWorld(tmp_path, COUNTING)
    agent = threading.Thread(target=world.live, daemon=True)
    agent.start()
    run = Run("cifar", world.config.run, world.store)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        progress = (world.store.read_status() or {}).get("progress") or {}
        if (progress.get("step") or 0) > 3:
            break
        time.sleep(0.05)
    said: list[str] = []
    ended = stopping.save_and_end(Session(world), run, "cancelled by fleetctl", world.clock, said.append, 60)  # type: ignore[arg-type]
    agent.join(60)
    (trained,) = [event for event in world.events() if event["event"] == "trainer-ended"]
    assert ("cancelled", True) == (ended.phase, ended.has_saved)
    assert ended.saved_step == trained["last_step"] == trained["saved_step"]
    assert progress["step"] <= trained["saved_step"] < 1000
    assert ended.reason.startswith("cancelled by fleetctl")
    assert world.fleet_state().startswith("cancelled")
    assert "asked" in said[0]


# ------------------------------------------------------------------------------------------------ against the rule book
class Agent:
    """What the agent does when it is asked, a while after."""

    def __init__(self, desk: Desk, run: str, *, step: int = 120, ends: bool = True) -> None:
        self.desk, self.run, self.store, self.step, self.ends = desk, run, desk.store(run), step, ends
        (self.instance,) = [one.id for one in desk.account.rules.instances() if one.state == "running"]
        self._write("training", 100)

    def _write(self, phase: str, saved: int, reason: str = "") -> None:
        self.store.write_status({
            **(self.store.read_status() or {}), "phase": phase, "reason": reason, "instance": self.instance, "term": 1,
            "progress": {"step": self.step, "saved": {"step": saved, "path": "", "time": ""}},
        })  # fmt: skip

    def heed(self) -> None:
        asked = self.store.get_json(LAYOUT.stop(1))
        if asked is None or not self.ends or (self.store.read_status() or {})["phase"] != "training":
            return
        self._write("cancelled", self.step, f"{asked['reason']}; the trainer exited with 75")
        fleet = (self.store.get_json(LAYOUT.fleet_document) or {})["fleet_id"]
        self.desk.account.cancel_spot_fleet_requests(SpotFleetRequestIds=[fleet], TerminateInstances=True)


@pytest.fixture
def training(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run whose trainer is at work; time passes where fleetctl waits, and the agent does its part."""
    done = desk.request()
    desk.pass_time(60)
    agent = Agent(desk, done["run"])

    class Passing(type(desk.account.clock)):  # type: ignore[misc]
        def sleep(self, seconds: float, until: Stop | None = None) -> bool:
            self.seconds += seconds
            agent.heed()
            desk.pass_time(seconds)
            return False

    monkeypatch.setattr("spotheal.agent.protocol.clock.SystemClock", Passing)
    return done, agent


def test_cancel_save_waits_for_the_checkpoint_and_says_its_step(desk: Desk, training: Any) -> None:
    done, _ = training
    document = desk.good("cancel", "--save", "--yes")
    assert ("cancelled", 120, True) == tuple(document[key] for key in ("phase", "saved_step", "cancelled"))
    assert [done["volume_id"]] == document["volumes_kept"]
    assert [] == desk.live_fleets()
    assert "cancelled by fleetctl" in desk.good("status")["reason"]
    assert desk.good("request", "--resume", "--yes")["run"] == done["run"]


def test_cancel_save_of_an_agent_that_does_not_answer_times_out_and_ends_nothing(desk: Desk, training: Any) -> None:
    training[1].ends = False
    result = desk.run("cancel", "--save", "--yes", "--timeout", "90s")
    assert ExitCode.WAIT_TIMED_OUT == result.exit_code
    assert "`fleetctl cancel cifar` without --save" in result.stderr
    assert 1 == len(desk.live_fleets())
    assert 90.0 == (desk.store(training[0]["run"]).get_json(LAYOUT.stop(1)) or {})["seconds"]


def test_cancel_save_where_nothing_trains_cancels_at_once(desk: Desk) -> None:
    done = desk.request()
    desk.pass_time(60)
    result = desk.run("cancel", "--save", "--yes")
    assert 0 == result.exit_code
    assert "nothing to save" in result.stderr
    assert [] == desk.live_fleets()
    assert None is desk.store(done["run"]).get_json(LAYOUT.stop(1))


@pytest.mark.parametrize(("comes", "code"), [(True, ExitCode.OK), (False, ExitCode.JOB_FAILED)])
def test_whoever_follows_a_run_follows_it_across_its_replacement(
    desk: Desk, training: Any, comes: bool, code: ExitCode
) -> None:
    _, agent = training
    agent._write("cancelled", 120, f"{REPLACED} at 2026-11-21T17:47:08Z; the trainer exited with 75")
    heartbeat = rfc3339(desk.account.clock.now())
    agent.store.write_status({**agent.store.read_status(), "heartbeat": heartbeat})
    agent.heed = (lambda: agent._write("done", 400)) if comes else lambda: None
    assert code == desk.run("status", "--watch").exit_code


def test_cancel_says_what_remains_and_what_removes_it(desk: Desk) -> None:
    done = desk.request()
    said = desk.run("cancel", "--yes").stderr
    assert done["volume_id"] in said and "fleetctl clean cifar" in said and "s3://" in said
    assert "--resume" in said
    desk.store(done["run"]).write_status({"phase": "done"})
    said = desk.run("cancel", "--yes").stderr
    assert done["volume_id"] in said and "--resume" not in said  # a run that is done is not resumed


def test_replace_requests_the_same_run_anew_only_when_its_instances_are_gone(desk: Desk, training: Any) -> None:
    done, agent = training
    fleet = desk.folder / "spot_fleet_config.json"
    fleet.write_text(fleet.read_text().replace("g4dn.xlarge", "g6.xlarge"))
    at_request: list[str] = []
    real = desk.account.request_spot_fleet

    def request(**arguments: Any) -> Any:
        at_request.extend(one.state for one in desk.account.rules.instances())
        return real(**arguments)

    desk.account.request_spot_fleet = request
    again = desk.request("--replace")
    assert (done["run"], done["volume_id"]) == (again["run"], again["volume_id"])
    assert again["fleet_id"] != done["fleet_id"]
    assert ["terminated"] == at_request
    assert "g6.xlarge" in again["instance_types"]
    stored = agent.store.read_status() or {}
    assert (Phase.REQUESTED.value, 120) == (stored["phase"], stored["progress"]["saved"]["step"])


def test_replace_that_was_interrupted_half_way_goes_on_when_it_is_typed_again(desk: Desk, training: Any) -> None:
    done, agent = training
    agent.store.put_json(LAYOUT.stop(1), {"reason": "replaced by fleetctl request --replace", "seconds": 600})
    agent.heed()
    desk.pass_time(120)
    again = desk.request("--replace")
    assert (done["run"], True) == (again["run"], again["fleet_id"] != done["fleet_id"])


def test_replace_of_a_run_that_comes_to_its_own_end_meanwhile_leaves_it_that_end(desk: Desk, training: Any) -> None:
    done, agent = training
    agent.heed = lambda: desk.end(done["run"], Phase.DONE) if desk.live_fleets() else None
    result = desk.run("request", "--replace", "--yes")
    assert ExitCode.CONFLICT == result.exit_code
    assert "is done" in result.stderr
    assert [] == desk.live_fleets()


def test_resume_new_run_and_replace_exclude_each_other(desk: Desk) -> None:
    for two in (("--resume", "--replace"), ("--new-run", "--replace"), ("--resume", "--new-run")):
        assert ExitCode.USAGE == desk.run("request", "--yes", *two).exit_code


def test_a_wait_for_instances_that_do_not_go_ends(desk: Desk, training: Any) -> None:
    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.fleet.run.session import Session as Real

    run = Run("cifar", training[0]["run"], desk.store(training[0]["run"]))
    with pytest.raises(WaitTimedOut, match="is still running"):
        stopping.await_gone(Real("us-west-2"), run, SystemClock(), lambda _: None, seconds_max=60)


def test_where_the_store_is_gone_the_jobs_fleet_is_found_by_its_tags_and_ended(desk: Desk) -> None:
    desk.request()
    desk.pass_time(60)
    for one in desk.s3.list_objects_v2(Bucket=BUCKET)["Contents"]:
        desk.s3.delete_object(Bucket=BUCKET, Key=one["Key"])
    desk.s3.delete_bucket(Bucket=BUCKET)
    ended = desk.good("cancel", "cifar", "--yes")["ended"]
    assert len(ended) == 2, "the fleet and its instance"
    assert desk.live_fleets() == []
    again = desk.run("cancel", "cifar", "--yes")
    assert again.exit_code == ExitCode.NOT_FOUND
    assert "there is no run of a job 'cifar'" in again.stderr


def test_a_job_of_that_name_in_another_store_is_ended_only_where_that_is_said(desk: Desk) -> None:
    with (desk.folder / "job.toml").open("a") as job:
        job.write(f'[store]\nurl = "s3://{BUCKET}/theirs"\n')
    desk.request()
    desk.pass_time(60)
    (desk.folder / "job.toml").unlink()
    refused = desk.run("cancel", "cifar", "--yes")
    assert refused.exit_code == ExitCode.NOT_FOUND
    assert f"runs with s3://{BUCKET}/theirs" in refused.stderr and "--all-stores" in refused.stderr
    assert len(desk.live_fleets()) == 1
    assert len(desk.good("cancel", "cifar", "--yes", "--all-stores")["ended"]) == 2
    assert desk.live_fleets() == []


@pytest.mark.parametrize(("kept", "words"), [(["vol-a"], "vol-a stays and costs"),
                                             (["vol-a", "vol-b"], "vol-a, vol-b stay and cost")])  # fmt: skip
def test_what_stays_is_said_in_the_right_number(
    kept: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    remains("mine", kept, "s3://store", is_done=True)
    assert words in capsys.readouterr().err
