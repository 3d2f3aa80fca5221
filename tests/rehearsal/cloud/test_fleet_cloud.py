"""`fleetctl request` against an account: what is made, what is not made twice, what is refused."""

from __future__ import annotations

import itertools
import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from botocore.exceptions import ConnectionClosedError
from fleet_desk import BUCKET, FLEET, Desk, desk, moto_clients, wheels

from spotheal.agent.protocol.clock import rfc3339
from spotheal.agent.protocol.errors import ExitCode
from spotheal.agent.protocol.names import LAYOUT, Phase
from spotheal.fleet.rehearsal.services.client import client_error
from spotheal.fleet.request import repository

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
        "Name": "spotheal-cifar",
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
    """One that job.toml names, and no job's tag."""
    job = desk.folder / "job.toml"
    if "[volume]" not in job.read_text():
        job.write_text(f'{job.read_text()}[volume]\nname = "DL-datasets-checkpoints"\n')
    tags = [{"ResourceType": "volume", "Tags": [{"Key": "Name", "Value": "DL-datasets-checkpoints"}]}]
    made = desk.account.create_volume(AvailabilityZone="us-west-2b", Size=50, TagSpecifications=tags)
    desk.pass_time(30)
    return str(made["VolumeId"])


def test_the_articles_volume_is_shown_and_after_adopt_used_as_it_is(desk: Desk) -> None:
    volume = article_volume(desk)
    dry = desk.good("request", "--dry-run")
    assert dry["volume"] == {"action": "adopt", "id": volume, "zone": "us-west-2b", "size_gib": 50}
    assert any(volume in step for step in dry["steps"])
    desk.good("volume", "adopt", volume, "--yes")
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


def test_a_request_that_aws_refused_can_be_corrected_and_sent_again_under_the_same_run(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> None:
        raise client_error("RequestSpotFleet", "InvalidSpotFleetRequestConfig", "The role is not good.", 400)

    with monkeypatch.context() as refusing:
        refusing.setattr(desk.account, "request_spot_fleet", refuse, raising=False)
        refused = desk.run("request", "--yes")
    assert refused.exit_code == ExitCode.UNEXPECTED
    assert "The role is not good." in refused.stderr
    assert "InvalidSpotFleetRequestConfig" in refused.stderr
    file = desk.folder / "spot_fleet_config.json"
    file.write_text(file.read_text().replace("role/fleet", "role/better"))
    done = desk.request()
    assert done["request"]["request_spot_fleet"]["SpotFleetRequestConfig"]["IamFleetRole"].endswith("role/better")
    assert len(desk.live_fleets()) == len(desk.volumes()) == 1


def test_a_request_whose_answer_was_lost_is_sent_again_unchanged_though_the_file_changed(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = desk.account.request_spot_fleet

    def lose(**arguments: Any) -> None:
        real(**arguments)
        raise ConnectionClosedError(endpoint_url="https://example.org")

    with monkeypatch.context() as losing:
        losing.setattr(desk.account, "request_spot_fleet", lose, raising=False)
        assert desk.run("request", "--yes").exit_code == ExitCode.UNEXPECTED
    file = desk.folder / "spot_fleet_config.json"
    file.write_text(file.read_text().replace("role/fleet", "role/better"))
    assert desk.run("request", "--yes", "--new-run").exit_code == ExitCode.CONFLICT
    assert desk.run("cancel", "--yes").exit_code == ExitCode.CONFLICT
    done = desk.request()
    assert any("not applied" in note for note in done["notes"])
    assert done["request"]["request_spot_fleet"]["SpotFleetRequestConfig"]["IamFleetRole"].endswith("role/fleet")
    assert [fleet.id for fleet in desk.live_fleets()] == [done["fleet_id"]]


def test_subnets_and_the_operators_own_template_are_read_and_nothing_of_theirs_changed(desk: Desk) -> None:
    subnet = next(iter(desk.account.describe_subnets()["Subnets"]))
    group = desk.account.describe_security_groups()["SecurityGroups"][0]["GroupId"]
    data = {
        "ImageId": "ami-12c6146b",
        "InstanceType": "g5.xlarge",
        "IamInstanceProfile": {"Name": "agent"},
        "SecurityGroupIds": [group],
    }
    desk.account.create_launch_template(LaunchTemplateName="theirs", LaunchTemplateData=data)
    fleet = {key: value for key, value in FLEET.items() if key != "LaunchSpecifications"}
    named = {"LaunchTemplateName": "theirs", "Version": "$Default"}
    fleet["LaunchTemplateConfigs"] = [
        {
            "LaunchTemplateSpecification": named,
            "Overrides": [{"InstanceType": "g5.xlarge", "SubnetId": subnet["SubnetId"]}],
        }
    ]
    (desk.folder / "spot_fleet_config.json").write_text(json.dumps(fleet))
    done = desk.good("request", "--yes", "--region", "us-west-2")
    assert done["zones"] == [subnet["AvailabilityZone"]]
    (template,) = done["request"]["create_launch_template"]
    assert template["LaunchTemplateData"]["SecurityGroupIds"] == [group]
    assert template["LaunchTemplateData"]["MetadataOptions"]["HttpTokens"] == "required"
    versions = desk.account.describe_launch_template_versions(LaunchTemplateName="theirs")["LaunchTemplateVersions"]
    assert len(versions) == 1
    desk.pass_time(60)
    assert len(desk.account.rules.instances()) == 1


def test_a_template_without_an_instance_profile_is_refused(desk: Desk) -> None:
    data = {"ImageId": "ami-0123456789abcdef0"}
    desk.account.create_launch_template(LaunchTemplateName="bare", LaunchTemplateData=data)
    fleet = {key: value for key, value in FLEET.items() if key != "LaunchSpecifications"}
    named = {"LaunchTemplateName": "bare", "Version": "1"}
    overrides = [{"InstanceType": "g5.xlarge", "AvailabilityZone": "us-west-2a"}]
    fleet["LaunchTemplateConfigs"] = [{"LaunchTemplateSpecification": named, "Overrides": overrides}]
    (desk.folder / "spot_fleet_config.json").write_text(json.dumps(fleet))
    refused = desk.run("request", "--yes")
    assert refused.exit_code == ExitCode.USAGE
    assert "IamInstanceProfile" in refused.stderr


def test_a_request_cut_short_at_any_call_goes_on_and_makes_nothing_twice(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call that changes something reaches AWS, and nobody hears of it; then the same is typed again."""
    source = repository.Source("https://example.org/a.git", "a" * 40, "HEAD")
    monkeypatch.setattr(repository, "resolve", lambda *_, **__: source)  # what git does takes most of the time
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


def test_of_two_requests_at_the_same_moment_one_is_refused(desk: Desk) -> None:
    """Both saw no run. Two fleets would be two bills, and `status` and `cancel` would know only the newer one."""
    desk.s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    now = datetime.now(timezone.utc)

    def other_began(moment: datetime) -> None:
        taken = {"run": "01OTHER0000000000000000000", "generation": 1, "time": rfc3339(moment), "host": "elsewhere"}
        body = json.dumps({**taken, "pid": 1, "request": "a"})
        desk.s3.put_object(Bucket=BUCKET, Key="cifar/requests/after-nothing.json", Body=body)

    other_began(now)
    refused = desk.run("request", "--yes")
    assert refused.exit_code == ExitCode.CONFLICT
    assert "01OTHER" in refused.stderr
    assert desk.live_fleets() == []
    other_began(now - timedelta(seconds=130))  # and it has written nothing since: its process is gone
    desk.request()
    assert len(desk.live_fleets()) == 1
