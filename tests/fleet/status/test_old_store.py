"""A store that commit f972a6a wrote is read: tests/data/store_of_f972a6a, of its rehearsal `notice-other-zone`.

The paths of the machine that rehearsed are cut to those of an instance, its days are moved, its curves thinned.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fleet_desk import BUCKET, REGION, Desk, desk, moto_clients, wheels

from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.names import StoreUrl

__all__ = ["desk", "moto_clients", "wheels"]
FOLDER = Path(__file__).parents[2] / "data/store_of_f972a6a"
RUN = "01KFMJ9W8RSXYKMZTWZ0HZKHNF"


@pytest.fixture
def old(desk: Desk) -> Desk:
    desk.s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
    store = Store(desk.s3, StoreUrl(BUCKET, f"digits/{RUN}"))
    for path in FOLDER.rglob("*"):
        if path.is_file():
            store.put_bytes(path.relative_to(FOLDER).as_posix(), path.read_bytes())
    return desk


def test_status_shows_an_old_run(old: Desk) -> None:
    document = old.good("status", "digits")
    assert ("done", "the trainer exited with 0", True) == tuple(document[key] for key in ("phase", "reason", "ended"))
    assert (2, "2026-01-23T04:38:56Z") == (document["term"], document["heartbeat"])
    assert {"id": "i-08133287637ebdcd9", "type": "g5.xlarge", "zone": "us-west-2b", "attempt": 2, "alive": False} == (
        document["instance"]
    )
    progress = document["progress"]
    assert (480, 480, 39, 100.0) == tuple(progress[key] for key in ("step", "steps_total", "epoch", "percent"))
    assert (0.975, 480) == (progress["metrics"]["val_acc"], progress["saved"]["step"])
    assert (480, "2026-01-23T04:38:55Z") == (document["checkpoint"]["step"], document["checkpoint"]["time"])
    assert (1, 1) == (document["interruptions"], document["zone_moves"])
    assert [
        ("g4dn.xlarge", "interrupted", "notice: terminate", 27.0, 167),
        ("g5.xlarge", "ended", "the trainer exited with 0", 36.0, 480),
    ] == [
        tuple(launch[key] for key in ("type", "outcome", "reason", "seconds", "saved_step"))
        for launch in document["launches"]
    ]
    assert [("vol-0fcbd04c340212ef7", [2], "vol-0e3e70682c2094cac"), ("vol-0e3e70682c2094cac", [1], None)] == [
        (volume["id"], volume["terms"], volume["copied_from"]) for volume in document["lineage"]
    ]
    assert (0.01, 76.7) == (document["cost"]["dollars"], document["cost"]["saved_percent"])
    assert "phase     done\nreason    the trainer exited with 0\n" in old.run("status", "digits").stdout


def test_report_draws_an_old_run(old: Desk) -> None:
    document = old.good("report", "digits")
    assert ("2026-01-23T04:37:51Z", 91, 1) == tuple(document[key] for key in ("start", "seconds", "machines_lost"))
    assert {"done": 480, "redone": 0, "lost": 0, "total": 480} == document["receipt"]["steps"]
    assert [("aws", 89, True), ("run", 38, False)] == [
        (stay["ended_by"], stay["seconds"], stay["free"]) for stay in document["receipt"]["instances"]
    ]
    assert [("i-07a024204f7c1bd87", "terminate", 167)] == [
        (taken["instance"], taken["action"], taken["step"]) for taken in document["interruptions"]
    ]
    assert [(2, 167, 0)] == [(resume["attempt"], resume["step"], resume["again"]) for resume in document["resumes"]]
    assert 0.975 == document["curves"]["val_acc"]["last"]


def test_clean_deletes_what_an_old_run_left(old: Desk) -> None:
    tags = {"spotheal:job": "digits", "spotheal:run": RUN, "spotheal:state": "done", "spotheal:term": "2"}
    specification = {"ResourceType": "volume", "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}
    volume = old.account.create_volume(AvailabilityZone="us-west-2b", Size=1, TagSpecifications=[specification])
    old.pass_time(60)
    document = old.good("clean", "--yes", "--region", REGION)
    assert [volume["VolumeId"]] == document["deleted"], document
