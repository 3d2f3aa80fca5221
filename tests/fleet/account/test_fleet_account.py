"""What a request needs in an account: found missing, made once, however often it is cut short."""

from __future__ import annotations

import fnmatch
import itertools
import json
from pathlib import Path
from typing import Any

import boto3
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from fleet_desk import BUCKET, Desk, desk, moto_clients, wheels
from moto.iam.models import iam_backends

from spotheal.agent.protocol import clock
from spotheal.agent.protocol.errors import ExitCode, PermissionDenied
from spotheal.agent.protocol.names import Phase, StoreUrl
from spotheal.fleet.account import prerequisites, roles
from spotheal.fleet.rehearsal.ec2.spotmarket import on_demand_price
from spotheal.fleet.rehearsal.services.account import Account
from spotheal.fleet.request import repository
from spotheal.fleet.run.session import Session
from spotheal.iam import policies

__all__ = ["desk", "moto_clients", "wheels"]  # fixtures
THEIRS = '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "ec2:Describe*", "Resource": "*"}]}'
TRUST = json.dumps(policies.trust("ec2.amazonaws.com"))
FLEET_ROLE = "aws-ec2-spot-fleet-tagging-role"
SPOTHEAL_INSTANCE = "arn:aws:iam::123456789012:role/spotheal-instance"
OURS = [SPOTHEAL_INSTANCE, SPOTHEAL_INSTANCE.replace("spotheal-instance", "spotheal-job-*")]


@pytest.fixture
def empty(desk: Desk, moto_clients: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Desk:
    """An account with nothing but its default VPC, and files as `fleetctl init` writes them."""
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    monkeypatch.setattr(clock, "SystemClock", lambda: desk.account.clock)  # each new role is waited for
    iam_backends.reset()
    Account(desk.account.rules.world, strict=True)  # with AWS's own policy for fleets
    ec2 = moto_clients["ec2"]
    forget(ec2)
    subnets = {one["AvailabilityZone"]: one["SubnetId"] for one in ec2.describe_subnets()["Subnets"]}
    spec = {
        "ImageId": "ami-12c6146b",
        "SubnetId": ", ".join(subnets[zone] for zone in ("us-west-2a", "us-west-2b")),
        "SecurityGroups": [{"GroupName": "spotheal-ssh"}],
        "IamInstanceProfile": {"Arn": "arn:aws:iam::123456789012:instance-profile/spotheal-instance"},
        "KeyName": "spotheal",
    }
    fleet = {
        "TargetCapacity": 1,
        "IamFleetRole": f"arn:aws:iam::123456789012:role/{FLEET_ROLE}",
        "LaunchSpecifications": [{**spec, "InstanceType": kind} for kind in ("g5.xlarge", "g6.xlarge")],
    }
    (desk.folder / "spot_fleet_config.json").write_text(json.dumps(fleet))
    public = Ed25519PrivateKey.generate().public_key()
    (tmp_path / "key.pub").write_bytes(public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    with (desk.folder / "job.toml").open("a") as job:
        job.write(f'[fleet]\nssh_from = "203.0.113.7/32"\npublic_key = "{tmp_path / "key.pub"}"\n')
        job.write("[limits]\nhours = 10\ndollars = 20\n")
    source = repository.Source("https://example.org/a.git", "a" * 40, "HEAD")
    monkeypatch.setattr(repository, "resolve", lambda *_, **__: source)
    return desk


def forget(ec2: Any) -> None:
    named = [{"Name": "group-name", "Values": ["spotheal-ssh"]}]
    for group in ec2.describe_security_groups(Filters=named)["SecurityGroups"]:
        ec2.delete_security_group(GroupId=group["GroupId"])
    for pair in ec2.describe_key_pairs()["KeyPairs"]:
        ec2.delete_key_pair(KeyName=pair["KeyName"])


def made(moto_clients: dict[str, Any]) -> dict[str, Any]:
    """What stands in the account, besides the run."""
    ec2, iam = moto_clients["ec2"], moto_clients["iam"]
    groups = ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": ["spotheal-ssh"]}])
    return {
        "roles": sorted(one["RoleName"] for one in iam.list_roles()["Roles"]),
        "profiles": {one["InstanceProfileName"]: [role["RoleName"] for role in one["Roles"]]
                     for one in iam.list_instance_profiles()["InstanceProfiles"]},
        "policies": iam.list_role_policies(RoleName="spotheal-instance")["PolicyNames"],
        "attached": [one["PolicyName"]
                     for one in iam.list_attached_role_policies(RoleName=FLEET_ROLE)["AttachedPolicies"]],
        "keys": [one["KeyName"] for one in ec2.describe_key_pairs()["KeyPairs"]],
        "open": [[(rule["FromPort"], [one["CidrIp"] for one in rule["IpRanges"]]) for rule in group["IpPermissions"]]
                 for group in groups["SecurityGroups"]],
    }  # fmt: skip


WHOLE: dict[str, Any] = {
    "roles": ["AWSServiceRoleForEC2Spot", "AWSServiceRoleForEC2SpotFleet", FLEET_ROLE, "spotheal-instance"],
    "profiles": {"spotheal-instance": ["spotheal-instance"]},
    "policies": ["spotheal-us-west-2", f"spotheal-us-west-2-{BUCKET}"],
    "attached": ["AmazonEC2SpotFleetTaggingRole"],
    "keys": ["spotheal"],
    "open": [[(22, ["203.0.113.7/32"])]],
}


@pytest.mark.parametrize(("young_seconds", "code"), [(110.0, 0), (200.0, 1)])
def test_a_new_role_is_waited_for_up_to_two_minutes(empty: Desk, young_seconds: float, code: int) -> None:
    """AWS refuses the fleet with these words until IAM has told EC2 of the role."""
    rules, clock = empty.account.rules, empty.account.clock
    rules.world.role_fault = lambda arn: (
        "Parameter: SpotFleetRequestConfig.IamFleetRole is invalid." if clock.seconds < young_seconds else None
    )
    assert empty.run("request", "--yes").exit_code == code
    assert len(rules.fleets()) == 1 - code
    assert clock.seconds < 150.0


def test_a_role_that_nobody_has_just_made_is_refused_within_seconds(empty: Desk) -> None:
    empty.request()
    empty.account.rules.world.role_fault = lambda arn: "Parameter: SpotFleetRequestConfig.IamFleetRole is invalid."
    before = empty.account.clock.seconds
    assert empty.run("request", "--replace", "--yes").exit_code == 1
    assert empty.account.clock.seconds - before < 30.0


def test_an_empty_account_gets_all_it_needs_in_one_plan(empty: Desk, moto_clients: dict[str, Any]) -> None:
    document = empty.request()
    assert made(moto_clients) == WHOLE
    assert empty.account.clock.seconds >= prerequisites.IAM_SECONDS, "the roles are not known everywhere yet"
    says = "; ".join(document["steps"])
    words = (f"create role {FLEET_ROLE}", "create role and instance profile spotheal-instance", "create bucket",
             "ssh from 203.0.113.7/32 only", "import key pair spotheal", "create a volume")  # fmt: skip
    assert [word for word in words if word not in says] == []
    group = moto_clients["ec2"].describe_security_groups(
        Filters=[{"Name": "group-name", "Values": ["spotheal-ssh"]}]
    )["SecurityGroups"][0]["GroupId"]
    data = [template.versions[0][0] for template in empty.account.rules.world.templates.all()]
    assert [one["SecurityGroupIds"] for one in data] == [[group], [group]]
    assert [one["KeyName"] for one in data] == ["spotheal", "spotheal"]
    costs = document["costs"]
    assert (costs["limit_hours"], costs["limit_dollars"]) == (10, 20)
    assert costs["volume_month"] == 8.0
    assert costs["on_demand_hour_max"] in (None, on_demand_price("g5.xlarge"))
    assert costs["instances_max"] == round(min(20, 10 * costs["hour_max"]), 2)


def test_what_is_there_is_no_step_of_the_next_request(empty: Desk) -> None:
    first = empty.request()
    empty.end(first["run"], Phase.DONE)
    steps = empty.request("--new-run")["steps"]
    assert not [one for one in steps if "role" in one or "key pair" in one or "group" in one]


def test_a_request_cut_short_at_any_call_of_an_empty_account_goes_on(
    empty: Desk, moto_clients: dict[str, Any]
) -> None:
    """Each call that makes something reaches AWS, and then the operator presses Ctrl-C; the same is typed again. What
    comes after the account's own things, from the bucket on, is cut in test_fleet_cloud."""
    for cut in itertools.count(1):
        empty.account.changed, empty.account.die_at = 0, cut
        assert empty.run("request", "--yes").exit_code != 0
        empty.account.die_at = 0
        is_past = any(one["Name"] == BUCKET for one in empty.s3.list_buckets()["Buckets"])
        done = empty.request()
        assert made(moto_clients) == WHOLE, f"cut at call {cut}"
        assert len(empty.live_fleets()) == 1, f"cut at call {cut}"
        if is_past:
            break
        empty.end(done["run"], Phase.DONE)
        _empty_again(empty, moto_clients)
    assert cut > 9


def _empty_again(empty: Desk, moto_clients: dict[str, Any]) -> None:
    for item in empty.s3.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        empty.s3.delete_object(Bucket=BUCKET, Key=item["Key"])
    empty.s3.delete_bucket(Bucket=BUCKET)
    for name in (FLEET_ROLE, "spotheal-instance"):
        roles.delete_role(Session("us-west-2"), name)
    forget(moto_clients["ec2"])


def test_a_policy_that_this_version_writes_otherwise_is_updated(empty: Desk, moto_clients: dict[str, Any]) -> None:
    session, store = Session("us-west-2"), StoreUrl(BUCKET, "")
    step = roles.missing_instance_role(session, "spotheal-instance", store)
    assert step is not None and step.verb == "create"
    prerequisites.make(session, step)
    assert roles.missing_instance_role(session, "spotheal-instance", store) is None
    name = WHOLE["policies"][0]
    moto_clients["iam"].put_role_policy(RoleName="spotheal-instance", PolicyName=name, PolicyDocument=THEIRS)
    again = roles.missing_instance_role(session, "spotheal-instance", store)
    assert again is not None and again.verb == "update" and [name for name, _ in again.documents] == [name]


def key_of(desk: Desk, region: str = "us-west-2") -> str:
    key = str(boto3.client("kms", region_name=region).create_key()["KeyMetadata"]["Arn"])
    with (desk.folder / "job.toml").open("a") as job:
        job.write(f'[volume]\nkms_key = "{key}"\n')
    return key


def test_a_role_may_use_the_customer_key_of_its_job(empty: Desk, moto_clients: dict[str, Any]) -> None:
    key = key_of(empty)
    assert empty.run("request", "--yes").exit_code == 0
    (name,) = (name for name in made(moto_clients)["policies"] if "+key-" in name)
    document = moto_clients["iam"].get_role_policy(RoleName="spotheal-instance", PolicyName=name)["PolicyDocument"]
    assert {key} == {statement["Resource"] for statement in document["Statement"]}
    (volume,) = empty.account.rules.volumes()
    assert (True, key) == (volume.encrypted, volume.kms_key)


def test_a_key_of_another_region_is_refused_before_anything_is_made(empty: Desk, moto_clients: dict[str, Any]) -> None:
    key_of(empty, "eu-west-1")
    refused = empty.run("request", "--yes")
    assert refused.exit_code == ExitCode.USAGE and "another region" in refused.output
    assert not moto_clients["iam"].list_instance_profiles()["InstanceProfiles"] and not empty.account.rules.volumes()


def test_a_volume_that_ec2_takes_back_is_exit_3_and_names_the_key(empty: Desk) -> None:
    key = key_of(empty)
    empty.account.rules.world.may_use_key = lambda caller, asked, actions: asked != key
    refused = empty.run("request", "--yes")
    assert refused.exit_code == ExitCode.PERMISSION and f"describe-key --key-id {key}" in refused.output
    assert not empty.account.rules.fleets()


def test_another_store_gets_a_policy_of_its_own_beside_the_first(empty: Desk, moto_clients: dict[str, Any]) -> None:
    session = Session("us-west-2")
    for store in (StoreUrl(BUCKET, ""), StoreUrl("team", "ml/runs"), StoreUrl("team", "ml/others")):
        step = roles.missing_instance_role(session, "spotheal-instance", store)
        assert step is not None
        prerequisites.make(session, step)
    found = moto_clients["iam"].list_role_policies(RoleName="spotheal-instance")["PolicyNames"]
    assert sorted(found) == ["spotheal-us-west-2", "spotheal-us-west-2-" + BUCKET, "spotheal-us-west-2-team-ml.others",
                             "spotheal-us-west-2-team-ml.runs"]  # fmt: skip


def inline_sizes(iam: Any, role: str) -> list[int]:
    """Characters of each inline policy, as IAM counts them."""
    names = iam.list_role_policies(RoleName=role)["PolicyNames"]
    documents = [iam.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"] for name in names]
    return [len(json.dumps(document, separators=(",", ":"))) for document in documents]


def test_one_role_serves_a_dozen_stores_within_iams_limit(empty: Desk, moto_clients: dict[str, Any]) -> None:
    session = Session("us-west-2")
    for number in range(12):
        store = StoreUrl("a-bucket-of-a-team", f"experiments/{number}")
        step = roles.missing_instance_role(session, "spotheal-instance", store)
        roles.check_room(session, [step])
        prerequisites.make(session, step)  # type: ignore[arg-type]
    assert sum(inline_sizes(moto_clients["iam"], "spotheal-instance")) <= 10_240


def test_a_role_without_room_is_refused_before_anything_is_made(empty: Desk, moto_clients: dict[str, Any]) -> None:
    """IAM takes 10,240 characters for all inline policies of a role; moto takes any number."""
    iam = moto_clients["iam"]
    iam.create_role(RoleName="spotheal-instance", AssumeRolePolicyDocument=TRUST)
    statement = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": f"arn:aws:s3:::{'a' * 7_000}"}
    large = {"Version": "2012-10-17", "Statement": [statement]}
    iam.put_role_policy(RoleName="spotheal-instance", PolicyName="spotheal-old", PolicyDocument=json.dumps(large))
    refused = empty.run("request", "--yes")
    assert refused.exit_code == ExitCode.CAPACITY
    assert "role spotheal-instance has no room" in refused.stderr and "10,240" in refused.stderr
    assert "aws iam delete-role-policy --role-name spotheal-instance" in refused.stderr
    assert iam.list_role_policies(RoleName="spotheal-instance")["PolicyNames"] == ["spotheal-old"]
    assert empty.live_fleets() == []


def test_a_role_with_policies_of_somebody_elses_is_left_as_it_is(empty: Desk, moto_clients: dict[str, Any]) -> None:
    iam = moto_clients["iam"]
    iam.create_role(RoleName="spotheal-instance", AssumeRolePolicyDocument=TRUST)
    iam.put_role_policy(RoleName="spotheal-instance", PolicyName="theirs", PolicyDocument=THEIRS)
    iam.create_instance_profile(InstanceProfileName="spotheal-instance")
    iam.add_role_to_instance_profile(InstanceProfileName="spotheal-instance", RoleName="spotheal-instance")
    assert roles.missing_instance_role(Session("us-west-2"), "spotheal-instance", StoreUrl(BUCKET, "")) is None


def test_a_job_with_a_trainer_policy_gets_its_role_in_the_plan(empty: Desk, moto_clients: dict[str, Any]) -> None:
    """A role of its own: no other job's policy adds to what it may do."""
    iam, trainer = moto_clients["iam"], {"RoleName": "spotheal-trainer-cifar"}
    (empty.folder / "policy.json").write_text(THEIRS)
    with (empty.folder / "job.toml").open("a") as job:
        job.write('[cage]\ntrainer_policy = "policy.json"\n')
    first = empty.request()
    step = "create role spotheal-trainer-cifar for the caged trainer: what this job's trainer_policy allows"
    assert step in first["steps"]
    (policy,) = iam.list_role_policies(**trainer)["PolicyNames"]
    assert iam.get_role_policy(**trainer, PolicyName=policy)["PolicyDocument"] == json.loads(THEIRS)
    (trust,) = iam.get_role(**trainer)["Role"]["AssumeRolePolicyDocument"]["Statement"]
    ours = [SPOTHEAL_INSTANCE, SPOTHEAL_INSTANCE.replace("spotheal-instance", "spotheal-job-cifar")]
    assert trust["Condition"]["ArnLike"]["aws:PrincipalArn"] == ours

    session = Session("us-west-2")
    assert roles.missing_trainer_role(session, ["spotheal-instance"], "cifar", THEIRS) is None
    changed = roles.missing_trainer_role(session, ["spotheal-instance"], "cifar", '{"Statement": []}')
    assert changed is not None and changed.verb == "update"
    more = roles.missing_trainer_role(session, ["theirs"], "cifar", THEIRS)
    assert more is not None and more.verb == "extend"
    prerequisites.make(session, more)
    (trust,) = iam.get_role(**trainer)["Role"]["AssumeRolePolicyDocument"]["Statement"]
    theirs = SPOTHEAL_INSTANCE.replace("spotheal-instance", "theirs")
    assert trust["Condition"]["ArnLike"]["aws:PrincipalArn"] == [*ours, theirs]


def test_a_trainer_policy_of_one_job_serves_no_other_job(empty: Desk, moto_clients: dict[str, Any]) -> None:
    """red team S8: a policy that allows everything got the union of all jobs' policies."""
    session, iam = Session("us-west-2"), moto_clients["iam"]
    everything = '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"*","Resource":"*"}]}'
    for job, document in (("cifar", THEIRS), ("imagenet", everything)):
        step = roles.missing_trainer_role(session, [f"spotheal-job-{job}"], job, document)
        assert step is not None
        prerequisites.make(session, step)
    for job, document in (("cifar", THEIRS), ("imagenet", everything)):
        role = f"spotheal-trainer-{job}"
        (policy,) = iam.list_role_policies(RoleName=role)["PolicyNames"]
        assert iam.get_role_policy(RoleName=role, PolicyName=policy)["PolicyDocument"] == json.loads(document)
        (trust,) = iam.get_role(RoleName=role)["Role"]["AssumeRolePolicyDocument"]["Statement"]
        other = {"cifar": "imagenet", "imagenet": "cifar"}[job]
        takers = trust["Condition"]["ArnLike"]["aws:PrincipalArn"]
        theirs = f"arn:aws:iam::123456789012:role/spotheal-job-{other}"
        assert not [arn for arn in takers if fnmatch.fnmatchcase(theirs, arn)]


def test_a_trainers_role_of_somebody_elses_is_left_as_it_is(empty: Desk, moto_clients: dict[str, Any]) -> None:
    iam = moto_clients["iam"]
    iam.create_role(RoleName="spotheal-trainer-cifar", AssumeRolePolicyDocument=TRUST)
    iam.put_role_policy(RoleName="spotheal-trainer-cifar", PolicyName="theirs", PolicyDocument=THEIRS)
    assert roles.missing_trainer_role(Session("us-west-2"), ["spotheal-instance"], "cifar", THEIRS) is None


def test_a_profile_named_after_the_job_is_for_that_job_alone(empty: Desk, moto_clients: dict[str, Any]) -> None:
    """As `fleetctl init` names it."""
    file = empty.folder / "spot_fleet_config.json"
    file.write_text(file.read_text().replace("profile/spotheal-instance", "profile/spotheal-job-cifar"))
    says = "create role and instance profile spotheal-job-cifar: job cifar and its part of the store, nothing else"
    assert says in empty.request()["steps"]
    by_sid: dict[str, Any] = {}
    for name in ("spotheal-us-west-2", f"spotheal-us-west-2-{BUCKET}-cifar"):
        policy = moto_clients["iam"].get_role_policy(RoleName="spotheal-job-cifar", PolicyName=name)["PolicyDocument"]
        by_sid |= {one["Sid"]: one for one in policy["Statement"]}
    assert by_sid["OnTheRun"]["Condition"] == {"StringEquals": {"ec2:ResourceTag/spotheal:job": "cifar"}}
    assert by_sid["Store"]["Resource"] == f"arn:aws:s3:::{BUCKET}/cifar/*"

    job = empty.folder / "job.toml"
    job.write_text(job.read_text().replace('"cifar"', '"other"'))
    refused = empty.run("request", "--yes")
    assert refused.exit_code == ExitCode.USAGE
    assert "names the instance profile spotheal-job-cifar of job cifar" in refused.stderr
    assert "spotheal-job-other" in refused.stderr


def test_tomorrows_address_is_opened_beside_todays(empty: Desk, moto_clients: dict[str, Any]) -> None:
    first = empty.request()
    empty.end(first["run"], Phase.DONE)
    job = empty.folder / "job.toml"
    job.write_text(job.read_text().replace("203.0.113.7/32", "2001:db8::7/128"))
    steps = empty.request("--new-run")["steps"]
    assert "open ssh from 2001:db8::7/128 in security group spotheal-ssh" in steps


def test_a_key_pair_that_nobody_can_make_is_exit_4_with_the_way_out(empty: Desk, tmp_path: Path) -> None:
    (tmp_path / "key.pub").unlink()
    result = empty.run("request", "--yes")
    assert result.exit_code == ExitCode.NOT_FOUND
    assert "public_key" in result.stderr and not empty.volumes()


def test_a_group_of_the_users_that_is_not_there_is_not_made_up(empty: Desk) -> None:
    file = empty.folder / "spot_fleet_config.json"
    file.write_text(file.read_text().replace("spotheal-ssh", "theirs"))
    result = empty.run("request", "--yes")
    assert result.exit_code == ExitCode.NOT_FOUND and "spotheal-ssh" in result.stderr


def test_instances_are_not_told_who_may_ssh_to_them(empty: Desk) -> None:
    run = empty.request()["run"]
    document = empty.store(run).get_json("job.json") or {}
    assert document["fleet"]["ssh_from"] == document["fleet"]["public_key"] == ""


def test_who_may_not_read_iam_is_told_so_and_goes_on(empty: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise PermissionDenied("no", code="AccessDenied")

    monkeypatch.setattr(roles, "missing_fleet_role", refused)
    assert any("may not read IAM" in note for note in empty.request()["notes"])
