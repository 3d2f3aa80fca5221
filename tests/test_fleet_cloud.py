"""`fleetctl request` against an account: what is made, what is not made twice, what is refused."""

from __future__ import annotations

import itertools

from fleet_desk import BUCKET, Desk, desk, moto_clients, wheels

from spotheal.agent.errors import ExitCode
from spotheal.agent.names import LAYOUT, Phase

__all__ = ["desk", "moto_clients", "wheels"]


def test_a_request_makes_everything_that_an_instance_needs(desk: Desk) -> None:
    done = desk.request()
    store = desk.store(done["run"])
    assert done["sent"] is True
    manifest = store.get_json(LAYOUT.manifest)
    assert manifest is not None
    assert {LAYOUT.wheels + item["name"] for item in manifest["files"]} == set(store.keys(LAYOUT.wheels))
    assert LAYOUT.repository_bundle in set(store.keys())
    job = store.get_json(LAYOUT.job_document)
    assert job is not None
    assert job["run"]["revision"] == done["revision"]
    assert (store.read_status() or {})["phase"] == "requested"
    assert (store.get_json(LAYOUT.fleet_document) or {})["fleet_id"] == done["fleet_id"]
    (volume,) = desk.volumes()
    assert volume.id == done["volume_id"]
    assert volume.tags == {
        "spotheal:job": "cifar",
        "spotheal:run": done["run"],
        "spotheal:state": "new",
        "spotheal:term": "0",
        "Name": "DL-datasets-checkpoints",
    }
    block = desk.s3.get_public_access_block(Bucket=BUCKET)["PublicAccessBlockConfiguration"]
    assert set(block.values()) == {True}
    (fleet,) = desk.live_fleets()
    assert fleet.id == done["fleet_id"]
    desk.pass_time(60)
    (instance,) = desk.account.rules.instances()
    assert instance.tags["spotheal:run"] == done["run"]


def test_the_dry_run_is_what_is_then_sent_and_changes_nothing(desk: Desk) -> None:
    dry = desk.good("request", "--dry-run")
    assert dry["sent"] is False
    assert dry["account"] == "123456789012"
    assert desk.live_fleets() == []
    assert desk.s3.list_buckets()["Buckets"] == []
    sent = desk.request()
    for document in (dry, sent):
        config = document["request"]["request_spot_fleet"]["SpotFleetRequestConfig"]
        assert config["Type"] == "maintain"
        assert len(document["request"]["create_launch_template"]) == 2
    assert dry["steps"][0] == sent["steps"][0]


def test_a_live_fleet_is_shown_and_not_doubled(desk: Desk) -> None:
    first = desk.request()
    shown = desk.request()
    assert shown["run"] == first["run"]
    assert shown["fleet"]["id"] == first["fleet_id"]
    assert len(desk.live_fleets()) == 1
    assert len(desk.volumes()) == 1


def test_the_same_name_after_an_end_is_a_conflict_until_the_operator_says_which(desk: Desk) -> None:
    first = desk.request()
    desk.end(first["run"], Phase.FAILED)
    refused = desk.run("request", "--yes")
    assert refused.exit_code == ExitCode.CONFLICT
    assert "--resume" in refused.stderr
    assert "--new-run" in refused.stderr


def test_resume_is_the_same_run_and_volume_under_another_fleet(desk: Desk) -> None:
    first = desk.request()
    desk.end(first["run"], Phase.PARKED)
    second = desk.request("--resume")
    assert (second["run"], second["volume_id"]) == (first["run"], first["volume_id"])
    assert second["generation"] == 2
    store = desk.store(first["run"])
    assert (store.read_status() or {})["phase"] == "requested"
    document = store.get_json(LAYOUT.fleet_document) or {}
    assert document["previous"] == [first["fleet_id"]]
    config = second["request"]["request_spot_fleet"]["SpotFleetRequestConfig"]
    assert config["ClientToken"] != first["request"]["request_spot_fleet"]["SpotFleetRequestConfig"]["ClientToken"]
    assert store.launches()[-1]["acknowledged"] is True  # the launches that parked it are forgiven


def test_a_run_that_is_done_is_not_resumed(desk: Desk) -> None:
    first = desk.request()
    desk.end(first["run"], Phase.DONE)
    refused = desk.run("request", "--yes", "--resume")
    assert refused.exit_code == ExitCode.CONFLICT
    assert "--new-run" in refused.stderr


def test_a_new_run_has_a_volume_of_its_own(desk: Desk) -> None:
    first = desk.request()
    desk.end(first["run"], Phase.DONE)
    second = desk.request("--new-run")
    assert second["run"] > first["run"]
    assert second["volume_id"] != first["volume_id"]


def test_a_new_run_beside_a_live_fleet_is_refused(desk: Desk) -> None:
    desk.request()
    assert desk.run("request", "--yes", "--new-run").exit_code == ExitCode.CONFLICT


def article_volume(desk: Desk) -> str:
    tags = [{"ResourceType": "volume", "Tags": [{"Key": "Name", "Value": "DL-datasets-checkpoints"}]}]
    made = desk.account.create_volume(AvailabilityZone="us-west-2b", Size=50, TagSpecifications=tags)
    desk.pass_time(30)
    return str(made["VolumeId"])


def test_the_articles_volume_is_shown_and_adopted_as_it_is(desk: Desk) -> None:
    volume = article_volume(desk)
    dry = desk.good("request", "--dry-run")
    assert dry["volume"] == {"action": "adopt", "id": volume, "zone": "us-west-2b", "size_gib": 50}
    assert any(volume in step for step in dry["steps"])
    done = desk.request()
    assert done["volume_id"] == volume
    assert desk.volumes()[0].tags["spotheal:state"] == "current"  # never `new`: only that may be formatted


def test_two_volumes_of_the_name_are_refused_with_both_ids_and_the_next_step(desk: Desk) -> None:
    both = [article_volume(desk), article_volume(desk)]
    refused = desk.run("request", "--yes")
    assert refused.exit_code == ExitCode.CONFLICT
    assert all(volume in refused.stderr for volume in both)
    assert "delete-tags" in refused.stderr
    assert desk.s3.list_buckets()["Buckets"] == []


def test_a_request_cut_short_at_any_call_goes_on_and_makes_nothing_twice(desk: Desk) -> None:
    """Each call that changes something reaches AWS, and nobody hears of it; then the same is typed again."""
    for cut in itertools.count(1):
        before, desk.account.changed, desk.account.die_at = len(desk.volumes()), 0, cut
        dead = desk.run("request", "--yes")
        desk.account.die_at = 0
        assert dead.exit_code == (ExitCode.UNEXPECTED if desk.account.changed == cut else 0), dead.output
        done = desk.request()
        assert [one.id for one in desk.live_fleets()] == [done.get("fleet_id") or done["fleet"]["id"]]
        assert len(desk.volumes()) == before + 1, f"cut at call {cut}"
        if dead.exit_code == 0:
            break
        desk.end(done["run"], Phase.DONE)
        _forget(desk)
    assert cut > 10


def _forget(desk: Desk) -> None:
    """An account without the job, for the next round."""
    for item in desk.s3.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        desk.s3.delete_object(Bucket=BUCKET, Key=item["Key"])
    desk.s3.delete_bucket(Bucket=BUCKET)
