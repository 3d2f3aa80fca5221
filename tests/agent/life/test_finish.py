"""The ends of a run: which cancel the fleet, and that cancelling comes last."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import IO, Any

import pytest
import structlog

from spotheal.agent.aws.s3 import Halt, Store, go_on
from spotheal.agent.life.finish import Finishing, cancel, record, store_results
from spotheal.agent.protocol.clock import Stop, never
from spotheal.agent.protocol.ends import End, TrainerEnd, decide_end, decide_parked, launches_without_progress
from spotheal.agent.protocol.errors import NotFound, PermissionDenied, Retryable
from spotheal.agent.protocol.names import LAYOUT, Phase, StoreUrl
from spotheal.agent.record.ledger import Ledger
from spotheal.agent.record.results import InStore
from spotheal.agent.record.status import Status


class FastClock:
    """Sleeps in no time and remembers how long it slept."""

    def __init__(self) -> None:
        self.passed = 0.0

    def now(self) -> datetime:
        return datetime(2026, 11, 21, tzinfo=timezone.utc) + timedelta(seconds=self.passed)

    def monotonic(self) -> float:
        return self.passed

    def sleep(self, seconds: float, until: Stop | None = None) -> bool:
        self.passed += seconds
        return until is not None and until.is_set()


class FakeStore(Store):
    """A store in a dictionary; `down` many writes fail first."""

    def __init__(self, down: int = 0) -> None:
        super().__init__(None, StoreUrl("bucket", "job/run"))
        self.objects: dict[str, Any] = {}
        self.down = down

    def put_file(self, key: str, path: Path, halt: Halt = go_on) -> None:
        if self.down:
            self.down -= 1
            raise Retryable("S3 does not answer")
        self.objects[key] = path.read_bytes()

    def put_json(self, key: str, body: Mapping[str, Any]) -> None:
        self.objects[key] = dict(body)

    def publish_status(self, status: Mapping[str, Any]) -> None:
        self.put_json(LAYOUT.status, status)

    def get_json(self, key: str) -> dict[str, Any] | None:
        return self.objects.get(key)

    def append_lines(self, key: str, lines: Iterable[str]) -> None:
        self.objects.setdefault(key, []).extend(lines)

    def highest_term(self) -> None:
        return None


class FakeCloud:
    """An EC2 whose answers are given."""

    def __init__(self, fleet: str | None = "sfr-1", faults: list[Exception] | None = None) -> None:
        self.fleet, self.faults = fleet, faults or []
        self.tags: dict[str, str] = {}
        self.cancelled: list[str] = []

    def tag(self, resources: Iterable[str], tags: Mapping[str, str]) -> None:
        self.tags.update(tags)

    def fleet_of(self, instance: str) -> str | None:
        return self.fleet

    def cancel_fleet(self, fleet: str) -> None:
        if self.faults:
            raise self.faults.pop(0)
        self.cancelled.append(fleet)


def finishing(store: FakeStore, cloud: FakeCloud, results: Path | None = None) -> Finishing:
    clock, log = FastClock(), structlog.get_logger()
    status = Status(store, clock, log, term=1)
    ledger = Ledger(store, clock, "i-0a", "us-west-2a")
    return Finishing(store, cloud, clock, ledger, status, log, "i-0a", "vol-1", results, 90)


@pytest.mark.parametrize(
    ("kind", "phase"), [("done", Phase.DONE), ("failed", Phase.FAILED), ("limit", Phase.LIMIT),
                                ("cancelled", Phase.CANCELLED), ("interrupted", None)]
)
def test_only_an_interruption_keeps_the_fleet(kind: str, phase: Phase | None) -> None:
    end = decide_end(TrainerEnd(kind, "because"))
    assert phase == (end and end.phase)


def test_an_unknown_ending_is_refused_and_not_guessed() -> None:
    with pytest.raises(ValueError, match="no way for a trainer to end"):
        decide_end(TrainerEnd("vanished"))
    with pytest.raises(ValueError, match="no end"):
        End(Phase.TRAINING, "")


def test_five_launches_without_a_checkpoint_park_the_run() -> None:
    barren = {"outcome": "booting", "reason": "no wheel"}
    assert decide_parked([barren] * 4) is None
    end = decide_parked([barren] * 5)
    assert end is not None
    assert Phase.PARKED is end.phase
    assert "no wheel" in end.reason


def test_a_checkpoint_starts_the_count_again_and_interruptions_do_not_count() -> None:
    barren, fruitful, interrupted = {}, {"acknowledged": True}, {"outcome": "interrupted"}
    assert 1 == launches_without_progress([barren, barren, fruitful, interrupted, barren])


def test_done_stores_results_and_marks_the_volume(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/model.safetensors").write_bytes(b"weights")
    store, cloud = FakeStore(down=3), FakeCloud()
    work = finishing(store, cloud, tmp_path)
    record(work, End(Phase.DONE, "exit 0"), store_results(work, never()))
    assert b"weights" == store.objects["results/deep/model.safetensors"]
    assert "done" == store.objects["status.json"]["phase"]
    assert {"spotheal:state": "done", "spotheal:saved-step": "90", "spotheal:reason": "done: exit 0"} == cloud.tags


def test_results_that_cannot_be_stored_keep_the_volume_and_say_so(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"weights")
    store, cloud = FakeStore(down=10**6), FakeCloud()
    work = finishing(store, cloud, tmp_path)
    end = record(work, End(Phase.DONE, "exit 0"), store_results(work, never()))
    assert "results not stored" in end.reason
    assert "spotheal:state" not in cloud.tags
    assert 900 <= work.clock.monotonic() < 1000


def test_a_failed_run_keeps_its_volume_for_resume() -> None:
    cloud = FakeCloud()
    record(finishing(FakeStore(), cloud), End(Phase.FAILED, "x" * 1000))
    assert "spotheal:state" not in cloud.tags
    assert 256 == len(cloud.tags["spotheal:reason"])


def test_cancelling_goes_on_until_it_holds() -> None:
    cloud = FakeCloud(faults=[Retryable("UnsuccessfulFleetRequests"), PermissionDenied("no"), NotFound("stale")])
    assert cancel(finishing(FakeStore(), cloud), never())
    assert ["sfr-1"] == cloud.cancelled


def test_the_fleet_is_taken_from_the_store_where_the_tag_is_missing() -> None:
    store, cloud = FakeStore(), FakeCloud(fleet=None)
    store.objects["fleet.json"] = {"fleet_id": "sfr-2"}
    assert cancel(finishing(store, cloud), never())
    assert ["sfr-2"] == cloud.cancelled


def test_without_a_fleet_nothing_is_cancelled() -> None:
    cloud = FakeCloud(fleet=None)
    assert not cancel(finishing(FakeStore(), cloud), never())
    assert [] == cloud.cancelled


def test_cancelling_can_be_cut_short() -> None:
    stop = threading.Event()
    stop.set()
    assert not cancel(finishing(FakeStore(), FakeCloud(faults=[Retryable("x")] * 99)), stop)


def test_launches_before_the_last_checkpoint_are_forgiven() -> None:
    """Of five that waited, or died, while another instance trained on, none says that the run makes no progress."""
    barren = [{"time": f"2026-11-21T08:0{minute}:00Z"} for minute in range(5)]
    assert 0 == launches_without_progress(barren, "2026-11-21T08:05:00Z")
    assert 3 == launches_without_progress(barren, "2026-11-21T08:02:00Z")


def test_a_file_that_cannot_be_stored_keeps_no_other_from_the_store(tmp_path: Path) -> None:
    for name in ("a", "bad", "z"):
        (tmp_path / name).write_bytes(b"x")

    class Choosy(FakeStore):
        def put_file(self, key: str, path: Path, halt: Halt = go_on) -> None:
            if path.name == "bad":
                raise PermissionDenied("could not write")
            super().put_file(key, path, halt)

    store = Choosy()
    work = finishing(store, FakeCloud(), tmp_path)
    assert store_results(work, never()).startswith("bad: could not write")
    assert {"results/a", "results/z"} <= store.objects.keys()


class SlowStore(FakeStore):
    """Each file takes a minute; `after` is called with the number of those that are stored."""

    def __init__(self, after: Callable[[int], None] = lambda count: None) -> None:
        super().__init__()
        self.clock, self._after = FastClock(), after

    def put_file(self, key: str, path: Path, halt: Halt = go_on) -> None:
        super().put_file(key, path, halt)
        self.clock.sleep(60.0)
        self._after(len(self.objects))


def forty_files(folder: Path, store: SlowStore) -> Finishing:
    for number in range(40):
        (folder / f"{number:02}").write_bytes(b"x")
    return replace(finishing(store, FakeCloud(), folder), clock=store.clock)


def test_a_machine_that_goes_away_stores_no_further_file(tmp_path: Path) -> None:
    stop = threading.Event()
    store = SlowStore(lambda count: stop.set() if count == 3 else None)
    assert "this machine goes away" == store_results(forty_files(tmp_path, store), stop)
    assert 3 == len(store.objects)


def test_results_that_are_all_stored_count_though_the_machine_goes_away(tmp_path: Path) -> None:
    stop = threading.Event()
    store = SlowStore(lambda count: stop.set() if count == 40 else None)
    assert "" == store_results(forty_files(tmp_path, store), stop)


@pytest.mark.parametrize(("limit", "stored"), [("", 40), ("limits.hours = 1 is reached", 15)])
def test_results_that_go_on_past_their_time_are_ended_by_the_limits_alone(
    tmp_path: Path, limit: str, stored: int
) -> None:
    """A run that ended at its limit has a quarter of an hour; one without goes on as long as files are stored."""
    store = SlowStore()
    work = replace(forty_files(tmp_path, store), limit=lambda: (limit, 60.0))
    assert limit == store_results(work, never())
    assert stored == len(store.objects)


def test_a_large_file_is_read_no_further_when_the_machine_goes_away(tmp_path: Path) -> None:
    stop, reads = threading.Event(), list[int]()

    class S3:
        def upload_fileobj(self, body: IO[bytes], bucket: str, key: str) -> None:
            while data := body.read(8):
                reads.append(len(data))
                stop.set()

    (tmp_path / "large").write_bytes(b"x" * 64)
    work = finishing(FakeStore(), FakeCloud(), tmp_path)
    place = InStore(Store(S3(), StoreUrl("bucket", "job/run")), "results/")
    assert "this machine goes away" == store_results(replace(work, results_to=place), stop)
    assert [8] == reads


def test_a_sparse_file_is_named_and_not_sent_as_zeros(tmp_path: Path) -> None:
    """A TiB that takes nothing on the disk would keep a paid machine for a day."""
    (tmp_path / "a").write_bytes(b"x")
    with (tmp_path / "sparse").open("w") as file:
        os.truncate(file.fileno(), 1 << 40)
    store = FakeStore()
    work = finishing(store, FakeCloud(), tmp_path)
    assert "sparse: sparse: 1024 GiB, of which 0 GiB are written" == store_results(work, never())
    assert {"results/a"} == store.objects.keys()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a link of another user")
def test_a_trainers_link_in_the_place_of_its_results_sends_nothing_of_the_machine(tmp_path: Path) -> None:
    machine, results = tmp_path / "root", tmp_path / "results"
    machine.mkdir()
    (machine / "key").write_bytes(b"x")
    results.symlink_to(machine)
    os.lchown(results, 64998, 64998)
    store = FakeStore()
    work = finishing(store, FakeCloud(), results)
    missing = store_results(work, never())
    assert "is a link that a trainer made" in missing
    assert not store.objects
    assert missing in record(work, End(Phase.DONE, "exit 0"), missing).reason
