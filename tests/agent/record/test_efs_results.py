"""Results at their place: metrics while a run goes on, a model whole at its end, and nothing lost without the place."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from agent_world import AgentWorld
from efs_world import FS, EfsApi, NfsHost, QuickClock, efs

from spotheal.agent.aws.s3 import Halt, Store, go_on
from spotheal.agent.files.folders import Folders
from spotheal.agent.machine.efs import MOUNT_POINT, Put
from spotheal.agent.processes.account import Account
from spotheal.agent.protocol.clock import never
from spotheal.agent.protocol.errors import ExitCode, PermissionDenied, Retryable
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job import parse_job
from spotheal.agent.protocol.names import EfsUrl, StoreUrl
from spotheal.agent.protocol.redaction import SECRETS
from spotheal.agent.record.results import InStore, LiveMetrics, OnEfs, Place, place_of
from spotheal.fleet.rehearsal.services.client import InMemoryS3

TRAINER = """
import json, os
results, metrics = os.environ["SPOTHEAL_RESULTS_DIR"], os.environ["SPOTHEAL_METRICS_FILE"]
open(metrics, "w").write(json.dumps({"step": 1, "loss": 0.5}) + "\\n")
os.makedirs(results + "/model")
open(results + "/model/model.bin", "w").write("weights")
"""


@pytest.fixture(autouse=True)
def restore_structlog() -> Iterator[None]:
    yield
    structlog.reset_defaults()


class Log:
    def __init__(self) -> None:
        self.said: list[str] = []

    def __getattr__(self, level: str) -> Any:
        return lambda text, **fields: self.said.append(f"{level} {text} {fields}")


# ------------------------------------------------------------------------------------------------------------ the place
def configured(results: str, index: int | None = None) -> InstanceConfig:
    job = parse_job({"job": {"name": "j", "repository": "/x", "command": ["x"]}, "store": {"results": results}})
    sweep = StoreUrl("bucket", "team/j/R")
    if index is None:
        return InstanceConfig(job, "R", "us-west-2", sweep, "0" * 40)
    own = sweep.below(f"entries/{index:05d}")
    return InstanceConfig(job, f"R{index:05d}", "us-west-2", own, "0" * 40, index=index, sources=sweep)


@pytest.mark.parametrize(
    ("results", "index", "place"),
    [
        ("", None, "s3://bucket/team/j/R/results/"),
        ("", 3, "s3://bucket/team/j/R/results/3/"),
        ("s3://other/models", None, "s3://other/models/j/R/"),
        ("s3://other", 3, "s3://other/j/R/3/"),
        (f"efs://{FS}/models", None, f"efs://{FS}/models/j/R/"),
        (f"efs://{FS}", 3, f"efs://{FS}/j/R/3/"),
    ],
)
def test_each_run_has_its_place_and_the_runs_of_a_sweep_lie_beside_each_other(
    results: str, index: int | None, place: str, tmp_path: Path
) -> None:
    host = NfsHost(tmp_path)

    def mounted(url: EfsUrl) -> Any:
        return efs(tmp_path, host, EfsApi(), url.folder)

    found = place_of(configured(results, index), InMemoryS3("bucket"), mounted, lambda: None)
    assert (str(found), found.is_elsewhere) == (place, bool(results))


def test_on_efs_a_sweeps_run_has_a_folder_in_that_of_the_sweep(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    host = NfsHost(tmp_path / "export")
    account = Account("me", os.getuid(), os.getgid(), (), "/")
    place = OnEfs(efs(tmp_path, host, EfsApi(), "models"), ["j", "R"], "3/", lambda: account)
    (tmp_path / "model.bin").write_bytes(b"weights")
    assert [put.fault for put in place.put([("model/model.bin", tmp_path / "model.bin")])] == [""]
    assert (tmp_path / "export/models/j/R/3/model/model.bin").read_bytes() == b"weights"
    assert (tmp_path / MOUNT_POINT).is_symlink()


def test_a_place_that_cannot_be_had_for_now_is_worth_another_try_and_one_that_refuses_is_not(tmp_path: Path) -> None:
    host = NfsHost(tmp_path)
    place = OnEfs(efs(tmp_path, host, EfsApi()), ["j", "R"], "", lambda: None)
    files = [("a", tmp_path / "a"), ("b", tmp_path / "b")]
    host.faults = [Retryable("Connection timed out")] * 99
    assert [(put.source.name, put.again) for put in place.put(files)] == [("a", True)]
    host.faults = [Retryable("access denied by server")]
    assert [(put.source.name, put.again) for put in place.put(files)] == [("a", False), ("b", False)]


# -------------------------------------------------------------------------------------------------------- the metrics
@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    made = Folders.at(tmp_path, "/volume")
    made.make(None)
    return made


def live(place: Place, folders: Folders, log: Log | None = None) -> LiveMetrics:
    return LiveMetrics(place, folders, folders.run_dir / "metrics.jsonl", QuickClock(), log or Log())


def test_metrics_are_at_the_place_while_the_run_goes_on_and_only_where_they_changed(folders: Folders) -> None:
    s3 = InMemoryS3("bucket")
    store = Store(s3, StoreUrl("bucket", "j/R"))
    metrics = live(InStore(store, "results/"), folders)
    assert metrics._once(never()) == "" and store.keys("results/") == []
    SECRETS.learn(["hunter2-hunter2"])
    folders.metrics_file.write_text('{"step": 1, "note": "hunter2-hunter2"}\n{"step": 2')
    metrics._once(never())
    body = store.get_bytes("results/metrics.jsonl") or b""
    assert json.loads(body)["step"] == 1 and b"hunter2" not in body
    store.delete("results/metrics.jsonl")
    metrics._once(never())
    assert store.keys("results/") == []
    folders.metrics_file.write_text('{"step": 1}\n{"step": 2}\n')
    metrics._once(never())
    assert (store.get_bytes("results/metrics.jsonl") or b"").count(b"\n") == 2


def test_a_trainers_own_file_of_that_name_is_the_one(folders: Folders) -> None:
    store = Store(InMemoryS3("bucket"), StoreUrl("bucket", "j/R"))
    folders.metrics_file.write_text('{"step": 1}\n')
    (folders.results / "metrics.jsonl").write_text('{"own": 1}\n')
    metrics = live(InStore(store, "results/"), folders)
    metrics._once(never())
    assert store.get_bytes("results/metrics.jsonl") == b'{"own": 1}\n'
    assert metrics.last() == []


def test_what_a_later_run_writes_never_comes_to_an_earlier_ones_place(folders: Folders) -> None:
    store, over = Store(InMemoryS3("bucket"), StoreUrl("bucket", "j/R")), threading.Event()
    folders.metrics_file.write_text('{"step": 1}\n')
    over.set()
    assert live(InStore(store, "results/"), folders)._once(over) == ""
    assert store.keys("results/") == []


class Flaky:
    """A place that refuses for a while."""

    is_elsewhere = True

    def __init__(self, stop: threading.Event, refusals: int, rounds: int) -> None:
        self.stop, self.refusals, self.rounds = stop, refusals, rounds

    def prepare(self) -> None:
        self.rounds -= 1
        if not self.rounds:
            self.stop.set()
        if self.refusals:
            self.refusals -= 1
            raise Retryable("EFS has taken nothing for 120 s")

    def put(self, files: Any, halt: Any = None) -> Iterator[Put]:
        return iter(())


def test_a_place_that_does_not_answer_is_told_once_and_tried_on(folders: Folders) -> None:
    log, stop = Log(), threading.Event()
    live(Flaky(stop, refusals=4, rounds=6), folders, log).watch(stop)
    assert [line.split()[0] for line in log.said] == ["warning", "info"]


# ------------------------------------------------------------------------------------------------------- a whole life
@pytest.mark.processes
def test_a_run_stores_its_results_on_efs_and_lists_them_in_its_store(tmp_path: Path) -> None:
    world = AgentWorld(tmp_path, TRAINER, job={"store": {"results": f"efs://{FS}/team"}})
    assert ExitCode.OK == world.live()
    assert world.status()["phase"] == "done"
    folder = tmp_path / "disks/nfs/team" / world.config.store.prefix
    there = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert there == {"model/model.bin": "weights", "metrics.jsonl": '{"step": 1, "loss": 0.5}\n'}
    listed = world.store.get_json("results.json") or {}
    assert listed["place"] == f"efs://{FS}/team/{world.config.store.prefix}/"
    assert {one["name"]: one["size"] for one in listed["files"]} == {name: len(text) for name, text in there.items()}
    assert all(len(one["sha256"]) == 64 for one in listed["files"])
    assert world.store.keys("results/") == []
    assert world.volume_tags()["spotheal:state"] == "done"


@pytest.mark.processes
def test_without_its_file_system_a_run_trains_ends_says_so_and_keeps_its_volume(tmp_path: Path) -> None:
    fault = Retryable("mount.nfs4: access denied by server")
    world = AgentWorld(tmp_path, TRAINER, job={"store": {"results": f"efs://{FS}"}}, nfs_fault=fault)
    assert ExitCode.OK == world.live()
    status = world.status()
    assert status["phase"] == "done"
    assert f"{FS} refuses the mount" in status["reason"] and f"they are kept on {world.volume}" in status["reason"]
    assert (world.mounted / "results/model/model.bin").read_text() == "weights"
    assert world.volume_tags()["spotheal:state"] == "current"
    assert world.fleet_state().startswith("cancelled")


@pytest.mark.processes
def test_a_bucket_that_refuses_results_keeps_them_on_the_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Store.put_file

    def refused(self: Store, key: str, path: Path, halt: Halt = go_on) -> None:
        if self.url.bucket == "spotheal-test" and self.url.prefix.startswith("elsewhere"):
            raise PermissionDenied("could not write: Access Denied", code="AccessDenied")
        real(self, key, path, halt)

    monkeypatch.setattr(Store, "put_file", refused)
    world = AgentWorld(tmp_path, TRAINER, job={"store": {"results": "s3://spotheal-test/elsewhere"}})
    assert ExitCode.OK == world.live()
    assert "results not stored" in world.status()["reason"]
    assert "spotheal:state" not in world.volume_tags() or world.volume_tags()["spotheal:state"] == "current"
