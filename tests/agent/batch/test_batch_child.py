"""A container of AWS Batch keeps the contract, goes on from copies, and tells Batch what to do by its exit code."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from batch_world import BUCKET, RUN, BatchWorld, no_efs

from spotheal.agent.aws.imds import SpotAction
from spotheal.agent.batch import child
from spotheal.agent.batch.place import Place, place, read_config
from spotheal.agent.life.finish import Finishing
from spotheal.agent.protocol.errors import ConfigError, NotFound
from spotheal.agent.protocol.names import StoreUrl
from spotheal.fleet.rehearsal.services.client import client_error

__all__ = ["no_efs"]
COUNTING = (Path(__file__).resolve().parents[2] / "trainers/counting.py").read_text()
WRITES_PARAMS = """
import json, os, pathlib
params = json.load(open(os.environ["SPOTHEAL_PARAMS_FILE"]))
assert os.environ["SPOTHEAL_INDEX"] == os.environ["AWS_BATCH_JOB_ARRAY_INDEX"] == str(params["n"])
pathlib.Path(os.environ["SPOTHEAL_RESULTS_DIR"], "model").mkdir()
pathlib.Path(os.environ["SPOTHEAL_RESULTS_DIR"], "model", "n").write_text(str(params["n"]))
"""


def eventually(what: Callable[[], object], seconds: float = 15.0) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_each_child_gets_its_entry_and_the_last_one_ends_the_list(tmp_path: Path) -> None:
    world = BatchWorld(tmp_path, WRITES_PARAMS, entries=[{"n": 0}, {"n": 1}])
    assert [world.live(index=1), world.live(index=0)] == [0, 0]
    assert [world.store.get_bytes(f"results/{index}/model/n") for index in (0, 1)] == [b"0", b"1"]
    assert world.status(1)["phase"] == "done" and world.status()["reason"] == "2 of 2 runs are done"
    assert world.store.keys("queue/") == ["queue/00000.0001", "queue/00000.done", "queue/00001.0001",
                                          "queue/00001.done"]  # fmt: skip


def test_a_child_that_always_fails_ends_as_failed_with_its_last_words_and_the_others_go_on(tmp_path: Path) -> None:
    script = "import os, sys\nif os.environ['SPOTHEAL_INDEX'] == '1': print('no such thing'); sys.exit(5)\n"
    world = BatchWorld(tmp_path, script, entries=[{}, {}])
    assert [world.live(index=1), world.live(index=0)] == [7, 0]
    assert "no such thing" in world.status(1)["reason"]
    assert (world.status()["phase"], world.status()["reason"]) == ("failed", "1 of 2 runs are done; failed: 1")
    assert world.live(index=0, attempt=2) == 0, "an array that is submitted again does not train again"


def test_a_child_whose_host_ends_without_a_word_goes_on_from_its_last_copy(tmp_path: Path) -> None:
    world = BatchWorld(tmp_path, COUNTING, job={"job": {"command": ["python", "train.py", "40", "0.1"]}})
    thread, codes = world.in_background()
    eventually(lambda: [key for key in world.store.keys("checkpoints/") if key.endswith(".json")])
    copied = world.store.keys("checkpoints/")
    world.stops["None-1"].set()  # SIGTERM, as when a host is shut down
    thread.join(20)
    assert codes == [75] and copied
    assert world.status()["phase"] == "interrupted"
    assert world.live(attempt=2) == 0
    text = (world.store.get_bytes("ledger.jsonl") or b"").decode()
    resumed = [line for line in text.splitlines() if '"trainer-started"' in line]
    assert '"resumed_step": 0' in resumed[0] and '"resumed_step": 0' not in resumed[1]
    assert (world.status()["phase"], world.status()["progress"]["step"]) == ("done", 40)


RESULTS = """
import os, pathlib
results = pathlib.Path(os.environ["SPOTHEAL_RESULTS_DIR"])
(results / "model.bin").write_text("weights")
if "STRANGE" in os.environ:
    open(os.fsencode(results) + b"/plot-\\xff.png", "w").close()
"""


def test_results_whose_place_refuses_them_fail_the_run_once_and_a_resume_has_them(tmp_path: Path) -> None:
    """Ten hosts in a row found the same, and what was trained lay nowhere."""
    world = BatchWorld(tmp_path, RESULTS, job={"store": {"results": "s3://elsewhere/models"}})
    refuses = True
    put = world.s3.upload_fileobj

    def denied(body: object, bucket: str, key: str, **more: object) -> object:
        if bucket == "elsewhere" and refuses:
            raise client_error("PutObject", "AccessDenied", "Access Denied", 403)
        return put(body, BUCKET if bucket == "elsewhere" else bucket, key, **more)

    world.s3.upload_fileobj = denied  # type: ignore[method-assign]
    assert world.live() == 7
    reason = world.status()["reason"]
    assert world.status()["phase"] == "failed" and "Access Denied" in reason and "submit --resume" in reason
    refuses = False
    world.store.write_status({"phase": "requested"})  # as --resume does
    assert world.live(attempt=2) == 0
    assert world.s3.get_object(Bucket=BUCKET, Key=f"models/j/{RUN}/model.bin")["Body"].read() == b"weights"


def test_a_child_asks_its_limits_while_it_stores_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def store_results(work: Finishing, stop: object) -> str:
        asked.append(work.limit()[0])
        return ""

    monkeypatch.setattr(child, "store_results", store_results)
    BatchWorld(tmp_path, RESULTS, job={"limits": {"hours": 0.0001}}).live()
    assert asked == ["limits.hours = 0.0001 is reached"]


def test_a_result_whose_name_no_place_takes_is_named_and_fails_nothing(tmp_path: Path) -> None:
    world = BatchWorld(tmp_path, RESULTS, job={"environment": {"STRANGE": "1"}})
    put = world.s3.upload_fileobj

    def as_boto_does(body: object, bucket: str, key: str, **more: object) -> object:
        key.encode()
        return put(body, bucket, key, **more)

    world.s3.upload_fileobj = as_boto_does  # type: ignore[method-assign]
    assert world.live() == 0
    assert world.status()["phase"] == "done" and "results not stored (plot-\\udcff.png" in world.status()["reason"]
    assert world.store.get_bytes("results/model.bin") == b"weights"


def test_a_store_that_is_throttled_and_loses_answers_costs_no_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWS gives a job ten, and they are for the hosts that go."""
    monkeypatch.setattr("spotheal.agent.life.preflight._RETRY_SECONDS", 0.05)
    world = BatchWorld(tmp_path, WRITES_PARAMS, entries=[{"n": 0}])
    world.s3.faults.throttle, world.s3.faults.lose_reply = 0.1, 0.1
    monkeypatch.setattr("batch_world.read_config", lambda s3, where: world.config)
    assert world.live(index=0) == 0
    world.s3.faults.throttle = world.s3.faults.lose_reply = 0.0
    assert world.status()["reason"] == "1 of 1 runs are done"
    assert world.store.get_bytes("results/0/model/n") == b"0"


def test_after_a_notice_a_container_saves_and_waits_for_its_host_to_end(tmp_path: Path) -> None:
    """Ended at once, its successor would be started on the same host."""
    world = BatchWorld(tmp_path, COUNTING, job={"job": {"command": ["python", "train.py", "400", "0.05"]}})
    thread, codes = world.in_background()
    eventually(lambda: (world.status().get("progress") or {}).get("step"))
    world.metadata.action = SpotAction("terminate", world.clock.now() + timedelta(seconds=43))
    eventually(lambda: world.status()["phase"] == "interrupted", 20)
    assert thread.is_alive()
    assert [key for key in world.store.keys("checkpoints/") if key.endswith(".json")]
    world.stops["None-1"].set()  # the host's own end
    thread.join(10)
    assert codes == [75]


def test_an_index_beyond_the_list_is_a_usage_error(tmp_path: Path) -> None:
    world = BatchWorld(tmp_path, "", entries=[{}, {}])
    with pytest.raises(ConfigError, match="index 2 is out of range: the list has 2 entries, 0 to 1"):
        world.live(index=2)


def test_a_run_that_is_not_there_is_told_from_a_bucket_that_is_not(tmp_path: Path) -> None:
    world = BatchWorld(tmp_path, "")
    with pytest.raises(NotFound, match="there is no run at"):
        read_config(world.s3, Place(StoreUrl("spotheal-test", "j/other"), "x", 1, None))
    with pytest.raises(NotFound, match="bucket nowhere does not exist"):
        read_config(world.s3, Place(StoreUrl("nowhere", "j/other"), "x", 1, None))


def test_the_environment_tells_the_place_of_a_container() -> None:
    environment = {"SPOTHEAL_STORE": "s3://bucket/j/run", "AWS_BATCH_JOB_ID": "1a2b3c4d-5:7",
                   "AWS_BATCH_JOB_ATTEMPT": "3", "AWS_BATCH_JOB_ARRAY_INDEX": "7"}  # fmt: skip
    found = place(environment)
    assert (found.name, found.attempt, found.index) == ("batch-1a2b3c4d-7-3", 3, 7)
    with pytest.raises(ConfigError, match="SPOTHEAL_STORE"):
        place({})
    with pytest.raises(ConfigError, match="must be a number"):
        place(environment | {"AWS_BATCH_JOB_ARRAY_INDEX": "x"})
