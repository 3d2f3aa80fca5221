"""The agent from its first call to its last: what each way to end leaves in store, tags and fleet."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog
from agent_world import AgentWorld
from botocore.exceptions import NoCredentialsError

from spotheal.agent.aws import clients
from spotheal.agent.aws.imds import NOTHING, Rebalance, SpotAction
from spotheal.agent.aws.s3 import Store
from spotheal.agent.life import finish, trainer_stage
from spotheal.agent.protocol.errors import ExitCode, NoCredentials, PermissionDenied
from spotheal.agent.record import boot_record as launch
from spotheal.agent.record import status
from spotheal.agent.volume import extents

pytestmark = pytest.mark.processes

QUICK = 'import os\nopen(os.environ["SPOTHEAL_RESULTS_DIR"] + "/model", "w").write("weights")\nprint("trained")\n'
# Saves a step each tenth of a second until it is told to stop, as a trainer that keeps the contract does.
SAVING = """
import json, os, signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
signal.signal(signal.SIGUSR1, lambda *_: None)
folder, progress = os.environ["SPOTHEAL_CHECKPOINT_DIR"], os.environ["SPOTHEAL_PROGRESS_FILE"]
step = max([int(n.split("-")[1]) for n in os.listdir(folder) if n.startswith("step-")], default=0)
while not told:
    step += 1
    open(f"{folder}/step-{step}", "w").write("x")
    with open(progress + ".tmp", "w") as f:
        json.dump({"step": step, "saved": {"step": step, "path": "", "time": ""}}, f)
    os.replace(progress + ".tmp", progress)
    time.sleep(0.1)
sys.exit(75)
"""


@pytest.fixture(autouse=True)
def restore_structlog() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def after(condition: Any, act: Any) -> threading.Thread:
    """Do `act` as soon as `condition` holds, beside the agent."""

    def wait() -> None:
        pause = threading.Event()
        for _ in range(600):
            if condition():
                return act()
            pause.wait(0.05)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_a_trainer_that_exits_with_0_ends_the_run_and_its_fleet(tmp_path: Path) -> None:
    world = AgentWorld(tmp_path, QUICK)
    assert ExitCode.OK == world.live()
    assert ("done", "") == (world.status()["phase"], world.status()["progress"] or "")
    assert b"weights" == world.store.get_bytes("results/model")
    assert world.fleet_state().startswith("cancelled")
    assert "done" == world.volume_tags()["spotheal:state"]
    told = [event["event"] for event in world.events() if event["event"] != "price"]  # it comes from its own thread
    assert ["boot", "volume", "trainer-started", "trainer-ended", "end"] == told
    assert not (world.root / "dltraining").exists()
    assert b"trained\n" == world.store.get_bytes(f"logs/{world.instance}/trainer.0000.log")


def test_a_result_whose_name_is_no_text_does_not_start_the_run_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3's keys are UTF-8, names of files any bytes: that such a file cannot be stored ended the agent, not the run."""
    script = QUICK + 'open(os.environb[b"SPOTHEAL_RESULTS_DIR"] + b"/\\xff", "w").close()\n'
    world = AgentWorld(tmp_path, script)
    upload = world.s3.upload_fileobj

    def as_boto3(body: Any, bucket: str, key: str) -> None:
        key.encode()  # raises UnicodeEncodeError
        upload(body, bucket, key)

    monkeypatch.setattr(world.s3, "upload_fileobj", as_boto3)
    assert ExitCode.OK == world.live()
    assert "done" == world.status()["phase"]
    assert "results not stored" in world.status()["reason"]
    assert world.status()["reason"].encode()
    assert "current" == world.volume_tags()["spotheal:state"]
    assert world.fleet_state().startswith("cancelled")


def test_a_run_that_is_done_without_a_checkpoint_leaves_no_superseded_volume(tmp_path: Path) -> None:
    world = AgentWorld(tmp_path, QUICK)
    tags = [{"Key": key, "Value": value} for key, value in world.volume_tags().items() if key != "spotheal:state"]
    surplus = world.operator.create_volume(
        AvailabilityZone="us-west-2b",
        Size=10,
        VolumeType="gp3",
        TagSpecifications=[
            {"ResourceType": "volume", "Tags": [*tags, {"Key": "spotheal:state", "Value": "superseded"}]}
        ],
    )["VolumeId"]
    assert ExitCode.OK == world.live()
    left = [volume.id for volume in world.rulebook.volumes() if volume.state not in ("deleting", "deleted")]
    assert [world.volume] == left
    assert surplus not in left


def test_a_trainer_that_always_fails_ends_the_run_with_its_last_words(tmp_path: Path) -> None:
    world = AgentWorld(tmp_path, 'raise SystemExit("no such column: label")', {"limits": {"failures": 2}})
    assert ExitCode.OK == world.live()
    status = world.status()
    assert "failed" == status["phase"]
    assert "no such column: label" in status["reason"]
    assert world.fleet_state().startswith("cancelled")
    assert "current" == world.volume_tags()["spotheal:state"]
    assert world.volume_tags()["spotheal:reason"].startswith("failed: ")


def test_a_revision_that_does_not_exist_is_an_end_and_nothing_is_trained(tmp_path: Path) -> None:
    world = AgentWorld(tmp_path, QUICK, revision="0" * 40)
    assert ExitCode.OK == world.live()
    assert "set-up failed" == world.status()["phase"]
    assert "0" * 40 in world.status()["reason"]
    assert world.fleet_state().startswith("cancelled")


def test_a_notice_leaves_a_handover_and_keeps_the_fleet(tmp_path: Path) -> None:
    world = AgentWorld(tmp_path, SAVING)

    def notice() -> None:
        world.metadata.action = SpotAction("terminate", world.clock.now() + timedelta(seconds=120))

    def power_cut() -> None:
        world.rulebook.kill(world.instance)

    after(lambda: any(world.disks.glob("*/checkpoints/step-3")), notice)
    after(lambda: any(event["event"] == "handover" for event in world.events()), power_cut)
    assert ExitCode.OK == world.live()
    assert "interrupted" == world.status()["phase"]
    assert "active" == world.fleet_state()
    handover = next(event for event in world.events() if event["event"] == "handover")
    snapshots = {snapshot.id: snapshot for snapshot in world.rulebook.snapshots()}
    tags = snapshots[handover["snapshot"]].tags
    assert ("handover", "1", str(handover["saved_step"])) == tuple(
        tags[f"spotheal:{name}"] for name in ("purpose", "term", "saved-step")
    )
    assert handover["detached"]
    assert "interrupted" == world.store.launches()[0]["outcome"]
    assert world.store.launches()[0]["acknowledged"]
    (memory,) = world.disks.glob("**/run.json")
    assert 1 == json.loads(memory.read_text())["final_saves"]  # it cost no step: saves need not come closer


def test_a_notice_during_setup_ends_it_and_leaves_the_volume_to_another(tmp_path: Path) -> None:
    setup = [["sh", "-c", f"touch {tmp_path}/begun; sleep 600"]]
    world = AgentWorld(tmp_path, "raise SystemExit('must not run')", job={"job": {"setup": setup}})

    def notice() -> None:
        world.metadata.action = SpotAction("terminate", world.clock.now() + timedelta(seconds=120))

    after((tmp_path / "begun").exists, notice)
    after(
        lambda: any(event["event"] == "handover" for event in world.events()),
        lambda: world.rulebook.kill(world.instance),
    )
    assert ExitCode.OK == world.live()
    assert ("interrupted", "active") == (world.store.launches()[0]["outcome"], world.fleet_state())
    handover = next(event for event in world.events() if event["event"] == "handover")
    assert (True, True) == (bool(handover["snapshot"]), handover["detached"])


def test_of_two_agents_that_race_for_one_volume_one_trains(tmp_path: Path) -> None:
    """Whole agents, with real trainers; the loser waits, and goes with the fleet."""
    script = SAVING.replace("while not told:", "while not told and step < 20:")
    world = AgentWorld(tmp_path, script.replace("exit(75)", "exit(75 if told else 0)"), target=2)
    other = world.another()
    codes: dict[str, ExitCode] = {}
    lives = [
        threading.Thread(target=lambda one=one: codes.update({one.instance: one.live()}), daemon=True)  # type: ignore[misc]
        for one in (world, other)
    ]
    for life in lives:
        life.start()
    for life in lives:
        life.join(90)
    started = {event["instance"] for event in world.events() if event["event"] == "trainer-started"}
    winner = world.store.highest_term()
    assert winner is not None
    assert ({winner.instance}, 1, "done") == (started, winner.number, world.status()["phase"])
    assert {world.instance, other.instance} == set(codes) and ExitCode.OK == codes[winner.instance]


def test_a_notice_that_is_withdrawn_lets_the_training_go_on(tmp_path: Path) -> None:
    world = AgentWorld(tmp_path, SAVING)

    def notice() -> None:
        world.metadata.action = SpotAction("terminate", world.clock.now() + timedelta(seconds=120))

    def withdraw() -> None:
        world.metadata.action = NOTHING

    def finish() -> None:
        world.rulebook.kill(world.instance)

    after(lambda: any(world.disks.glob("*/checkpoints/step-3")), notice)
    after(lambda: any(event["event"] == "handover" for event in world.events()), withdraw)
    starts = lambda: [event for event in world.events() if event["event"] == "trainer-started"]  # noqa: E731
    after(lambda: len(starts()) == 2, finish)
    world.live()
    first, second = starts()
    assert 2 == second["term"]
    assert 2 == second["attempt"]
    assert first["term"] == 1


def test_a_sigterm_without_a_notice_hands_over_and_asks_to_be_started_again(tmp_path: Path) -> None:
    """It may be a person's `kill`: with exit code 0 the machine would idle for as long as its fleet lives."""
    world = AgentWorld(tmp_path, SAVING)
    after(lambda: any(world.disks.glob("*/checkpoints/step-3")), world.asked_to_stop.set)
    assert ExitCode.INTERRUPTED == world.live()
    handover = next(event for event in world.events() if event["event"] == "handover")
    assert handover["detached"]
    assert "active" == world.fleet_state()


PLAIN = """
import pathlib, time
last = pathlib.Path("checkpoints/last.txt")
print("setup wrote", pathlib.Path("data.txt").read_text())
if last.exists():
    print("resumed at", last.read_text())
else:
    last.parent.mkdir()
    last.write_text("step 7")
    time.sleep(60)
"""


def test_a_script_that_saves_next_to_its_code_resumes_on_a_machine_that_reaches_no_repository(tmp_path: Path) -> None:
    """And `setup`, which writes there too, ran once (trainers of others, F1 and F8)."""
    prepare = ["python", "-c", "open('data.txt', 'a').write('once')"]
    world = AgentWorld(tmp_path, PLAIN, {"job": {"setup": [prepare]}})
    after(lambda: any(world.disks.glob("*/working-copy/checkpoints/last.txt")), world.asked_to_stop.set)
    assert ExitCode.INTERRUPTED == world.live()
    shutil.rmtree(world.root)
    shutil.rmtree(tmp_path / "repository")
    world.asked_to_stop.clear()
    assert ExitCode.OK == world.live()
    assert "done" == world.status()["phase"], world.status()["reason"]
    said = b"".join(world.store.get_bytes(key) or b"" for key in world.store.keys(f"logs/{world.instance}/trainer"))
    assert b"setup wrote once\nresumed at step 7\n" in said
    assert b"step 7" == world.store.get_bytes("results/checkpoints/last.txt"), "its results folder is empty"
    assert world.store.get_bytes("results/train.py") is None


def test_a_machine_records_where_its_trainers_code_lies_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_stage, "EXTENTS_SECONDS", (0.1,))
    monkeypatch.setattr(extents, "_extents_of", lambda file: [(0, 1)])  # not every file system of a test says it
    world = AgentWorld(tmp_path, PLAIN, {})
    after(lambda: any(world.disks.glob("*/.spotheal/extents.json")), world.asked_to_stop.set)
    assert ExitCode.INTERRUPTED == world.live()


def test_the_next_machine_tells_what_the_one_before_wrote_and_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rehearsal failed for it; on a real run nobody knew."""
    monkeypatch.setattr(trainer_stage, "FILES_SECONDS", 0.1)
    world = AgentWorld(tmp_path, PLAIN, {"job": {"setup": [["python", "-c", "open('data.txt', 'w').write('once')"]]}})
    recorded = lambda: any("last.txt" in path.read_text() for path in world.disks.glob("*/.spotheal/files.json"))  # noqa: E731
    after(recorded, world.asked_to_stop.set)
    assert ExitCode.INTERRUPTED == world.live()
    (last,) = world.disks.glob("*/working-copy/checkpoints/last.txt")
    last.rename(last.with_name("elsewhere"))
    world.asked_to_stop.clear()
    after(lambda: world.status()["phase"] == "training", world.asked_to_stop.set)
    world.live()
    (told,) = [event for event in world.events() if event["event"] == "predecessor-files"]
    name = "working-copy/checkpoints/last.txt"
    assert [told["predecessor"], told["attempt"], told["written"]] == [world.instance, 1, [name]]
    assert [told["missing"], told["missing_count"]] == [[name], 1]


def test_an_instance_launched_into_a_finished_run_only_cancels_its_fleet(tmp_path: Path) -> None:
    world = AgentWorld(tmp_path, "raise SystemExit('must not run')")
    world.store.write_status({"phase": "done", "reason": "the trainer exited with 0"})
    assert ExitCode.OK == world.live()
    assert {"phase": "done", "reason": "the trainer exited with 0"} == world.status()
    assert world.fleet_state().startswith("cancelled")
    assert [] == world.store.keys("terms/")


def test_five_launches_that_gained_nothing_park_the_run(tmp_path: Path) -> None:
    world = AgentWorld(tmp_path, "raise SystemExit('must not run')")
    for number in range(5):
        world.store.count_launch(f"i-{number}", {"time": "2026", "reason": "a wheel is missing"})
    assert ExitCode.OK == world.live()
    assert "parked" == world.status()["phase"]
    assert "a wheel is missing" in world.status()["reason"]
    assert world.fleet_state().startswith("cancelled")


def test_a_machine_whose_gpu_is_too_small_ends_itself_and_its_type_is_barred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "nvidia-smi").write_text("#!/bin/sh\necho 15360 MiB\n")
    (programs / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    world = AgentWorld(tmp_path, "raise SystemExit('must not run')", job={"job": {"gpu_memory_gib": 24}})
    assert ExitCode.OK == world.live()
    launch = world.store.launches()[0]
    assert ("barred", "active") == (launch["outcome"], world.fleet_state())
    assert "g5.xlarge has 1 GPU of 15 GiB, and the job asks for 1 GPU of 24 GiB or more" == launch["reason"]
    assert "has 1 GPU of 15 GiB" == (world.store.get_json("barred/g5.xlarge.json") or {})["what"]
    assert "Client.UserInitiatedShutdown" == world.rulebook.instances()[0].reason[0]
    assert "barred" in [event["event"] for event in world.events()]
    assert not [one for one in world.rulebook.volumes() if one.attachment]


def test_a_rebalance_recommendation_takes_a_base_snapshot_and_goes_on(tmp_path: Path) -> None:
    world = AgentWorld(tmp_path, SAVING)

    def recommend() -> None:
        world.metadata.recommendation = Rebalance(world.clock.now())

    after(lambda: any(world.disks.glob("*/checkpoints/step-3")), recommend)
    after(lambda: bool(world.rulebook.snapshots()), lambda: world.rulebook.kill(world.instance))
    world.live()
    assert ["base"] == [snapshot.tags["spotheal:purpose"] for snapshot in world.rulebook.snapshots()][:1]
    assert 1 == sum(event["event"] == "trainer-started" for event in world.events())


def test_a_run_out_of_hours_saves_and_ends(tmp_path: Path) -> None:
    world = AgentWorld(tmp_path, SAVING, {"limits": {"hours": 0.001}})
    assert ExitCode.OK == world.live()
    assert "limit" == world.status()["phase"]
    assert "limits.hours" in world.status()["reason"]
    assert world.fleet_state().startswith("cancelled")


def test_an_operators_stop_saves_the_newest_step_stores_the_results_and_ends_the_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "PUBLISH_SECONDS_MIN", 0.2)
    world = AgentWorld(tmp_path, SAVING, {"job": {"keep_on_failure": "1h"}})  # which is not for debugging
    asked = {"reason": "cancelled by fleetctl", "seconds": 60}
    after(lambda: any(world.disks.glob("*/checkpoints/step-3")), lambda: world.store.put_json("terms/1.stop", asked))
    assert ExitCode.OK == world.live()
    found = world.status()
    assert ("cancelled", True) == (found["phase"], found["reason"].startswith("cancelled by fleetctl"))
    (ended,) = [event for event in world.events() if event["event"] == "trainer-ended"]
    assert ended["saved_step"] == ended["last_step"] >= 3
    assert world.fleet_state().startswith("cancelled")
    assert ExitCode.OK == world.live()  # a launch that was under way ends again, and starts no trainer
    assert 1 == sum(event["event"] == "trainer-started" for event in world.events())


def test_a_role_that_may_not_write_the_store_still_ends_the_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = AgentWorld(tmp_path, QUICK)
    monkeypatch.setattr(launch, "COUNT_SECONDS_MAX", 0.0)
    monkeypatch.setattr(finish, "RECORD_SECONDS_MAX", 0.0)

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionDenied("could not write", code="AccessDenied")

    monkeypatch.setattr(Store, "put_bytes", refuse)
    monkeypatch.setattr(Store, "append_lines", refuse)
    assert ExitCode.OK == world.live()
    assert world.fleet_state().startswith("cancelled")


def test_credentials_that_the_metadata_service_does_not_give_are_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A metadata service that was down for two minutes used to cancel the fleet as soon as it was back."""
    world = AgentWorld(tmp_path, QUICK)
    monkeypatch.setattr(launch, "COUNT_SECONDS_MAX", 0.0)
    with monkeypatch.context() as outage:

        def refuse(*_: Any, **__: Any) -> Any:
            with clients.translated("read the store"):
                raise NoCredentialsError

        outage.setattr(Store, "get_bytes", refuse)
        with pytest.raises(NoCredentials):
            world.live()
    assert "active" == world.fleet_state()
    assert ExitCode.OK == world.live()
    assert "done" == world.status()["phase"]


def test_an_agent_that_is_started_again_and_again_parks_the_run(tmp_path: Path) -> None:
    world = AgentWorld(tmp_path, "raise SystemExit('must not run')")
    world.store.count_launch(world.instance, {"time": "2026", "starts": 10})
    assert ExitCode.OK == world.live()
    assert "parked" == world.status()["phase"]
    assert "11 times" in world.status()["reason"]
