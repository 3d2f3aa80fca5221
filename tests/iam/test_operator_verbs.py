"""Every verb is lived once under the printed policies in the local cloud; and nothing is printed that no verb needs.

The questions that AWS would ask are noted on the way. Taking a statement, or one of its actions, out of a policy is
then a matter of evaluation: some question must be refused.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import botocore.loaders
import pytest
from cloud_desk import owner, speaking_to
from fleet_desk import wheels
from typer.testing import CliRunner

from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.names import StoreUrl
from spotheal.fleet import cli
from spotheal.fleet.account import prerequisites
from spotheal.fleet.files import rescue
from spotheal.fleet.rehearsal.ec2.rulebook import Latencies
from spotheal.fleet.rehearsal.machines.machines import Machine
from spotheal.fleet.rehearsal.scenarios.cloud import Cloud
from spotheal.fleet.rehearsal.services import account, efs
from spotheal.fleet.rehearsal.services.authorization import of_people
from spotheal.fleet.request import wheelhouse
from spotheal.fleet.request.wheelhouse import Wheelhouse
from spotheal.fleet.volumes import filling
from spotheal.iam import policies
from spotheal.iam.calls import NOT_CALLS, Who
from spotheal.iam.evaluation import Question, is_allowed

__all__ = ["wheels"]
ACCOUNT, REGION = "123456789012", "us-west-2"
BUCKET = f"spotheal-{ACCOUNT}-{REGION}"
OPERATOR, ADMINISTRATOR, BOTH = "operator", "administrator", "operator-and-administrator"
QUICK = Latencies(
    create_volume=0, attach=0, device_node=0, detach=0, delete_volume=0, snapshot=(0,), snapshot_interval=0, running=0,
    shutdown=0, launch=0, replacement=0, set_aside=0, fleet_terminate=0,
)  # fmt: skip
DOCKER = "#!/bin/sh\n[ $1 != login ] || cat > /dev/null\n"
JOB = """
[job]
name = "day"
repository = "."
command = ["python", "train.py"]
[volume]
name = "day-data"
size_gib = 2
[batch]
image = "public.example/spotheal:1"
gpus = 0
"""


class Idle(Machine):
    """An instance that is there and does nothing."""

    def boot(self) -> None:
        pass


@dataclass
class Life:
    """The account, the operator's folder, and what AWS was asked on the way: (caller, question)."""

    cloud: Cloud
    folder: Path
    asked: set[tuple[str, str]] = field(default_factory=set)
    lived: set[tuple[str, ...]] = field(default_factory=set)

    def note(self, caller: str, question: Question) -> None:
        self.asked.add((caller, json.dumps([question.action, question.resource, question.context], sort_keys=True)))

    def verb(self, who: str, *arguments: str, ends: tuple[int, ...] = (0,), typed: str | None = None) -> str:
        os.environ |= self.cloud.endpoint.key_of_person(f"user/{who}").environment
        self.lived.add(arguments)
        result = CliRunner().invoke(cli.app, list(arguments), input=typed)
        refused = [one for one in self.cloud.endpoint.authorization.refused if one[0].startswith("user/")]
        assert refused == [], f"{who}: {' '.join(arguments)}: {refused}\n{result.output}"
        assert result.exit_code in ends, f"{who}: {' '.join(arguments)}: {result.exit_code}\n{result.output}"
        return result.stdout

    def job(self, more: str = "", of_volume: str = "") -> None:
        (self.folder / "job.toml").write_text(JOB.replace("size_gib = 2", f"size_gib = 2\n{of_volume}") + more)

    def snapshot(self, name: str) -> str:
        """Of that volume, with its tags, as an agent takes one."""
        volume, ec2 = self.cloud.rules.volume(name), owner("ec2")
        assert volume is not None
        tags = [{"Key": key, "Value": value} for key, value in volume.tags.items()]
        tagged = [{"ResourceType": "snapshot", "Tags": tags}]
        return str(ec2.create_snapshot(VolumeId=volume.id, TagSpecifications=tagged)["SnapshotId"])

    @functools.cached_property
    def questions(self) -> list[tuple[str, Question]]:
        found = [(caller, json.loads(text)) for caller, text in sorted(self.asked)]
        return [(caller, Question(*question)) for caller, question in found if caller.startswith("user/")]


def a_job(life: Life) -> None:
    """An empty account: the administrator makes the roles, the operator does all the rest."""
    life.verb(OPERATOR, "init", "--command", "python train.py", "--gpus", "1", "--name", "day")
    life.verb(OPERATOR, "init", "--command", "python train.py", "--gpus", "0", "--name", "day", "--force")
    life.verb(ADMINISTRATOR, "iam", "show")
    for _ in range(2):  # made, then looked at
        life.verb(ADMINISTRATOR, "iam", "create", "--job", "day", "--yes")
    life.verb(OPERATOR, "validate")
    life.verb(OPERATOR, "request", "--dry-run")
    run = json.loads(life.verb(OPERATOR, "request", "--yes", "--output", "json"))["run"]
    life.cloud.rules.tick()
    for verb in ("status", "report", "logs"):
        life.verb(OPERATOR, verb)
    life.verb(OPERATOR, "status", "--all")
    store = Store(owner("s3"), StoreUrl(BUCKET, f"day/{run}"))
    store.put_bytes("results/model", b"x")
    life.verb(OPERATOR, "results", "ls")
    life.verb(OPERATOR, "results", "get", "--to", "fetched")
    life.verb(OPERATOR, "ssh", "day", "--", "true", ends=(0, 1, 4, 6, 255))  # nobody answers there
    life.verb(OPERATOR, "cancel", "--yes")
    store.write_status({**(store.read_status() or {}), "phase": "done"})
    life.snapshot(next(one.id for one in life.cloud.rules.volumes() if one.tags.get("spotheal:run") == run))
    life.verb(OPERATOR, "clean", "day", "--store", "--all", "--yes")


def a_job_with_every_option(life: Life) -> None:
    """A rescue's role is made by the request; so the operator is an administrator here."""
    options = '\n[limits]\nhours = 10\ndollars = 20\n[fleet]\non_demand_after = "1h"\nengine = "ec2-fleet"\n'
    policy = {"Version": "2012-10-17", "Statement": [
        {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::data/*"}]}  # fmt: skip
    (life.folder / "policy.json").write_text(json.dumps(policy))
    life.job()
    made = json.loads(life.verb(OPERATOR, "volume", "create", "--yes", "--zone", "us-west-2d", "--output", "json"))
    dataset = life.snapshot(made["id"])
    life.verb(OPERATOR, "volume", "rm", made["id"], "--yes")
    life.job(f'{options}[cage]\ntrainer_policy = "policy.json"\n', f'snapshot = "{dataset}"')
    life.verb(BOTH, "request", "--yes", "--new-run")
    life.cloud.rules.tick()
    life.verb(OPERATOR, "status")
    life.verb(OPERATOR, "request", "--yes", "--replace")
    live = [fleet.id for fleet in life.cloud.rules.fleets() if fleet.state == "active"]
    owner("ec2").delete_fleets(FleetIds=live, TerminateInstances=False)  # its instance is the operator's to end
    life.verb(OPERATOR, "cancel", "--yes")
    life.verb(OPERATOR, "clean", "--unfinished", "--all", "--yes")
    life.job()
    of_init = json.loads((life.folder / "spot_fleet_config.json").read_text())["LaunchSpecifications"][0]
    template = {"ImageId": of_init["ImageId"], "IamInstanceProfile": {"Name": "spotheal-job-day"}}
    owner("ec2").create_launch_template(LaunchTemplateName="mine", LaunchTemplateData=template)
    named = {"LaunchTemplateName": "mine", "Version": "1"}
    fleet = {"IamFleetRole": f"arn:aws:iam::{ACCOUNT}:role/aws-ec2-spot-fleet-tagging-role", "TargetCapacity": 1,
             "AllocationStrategy": "priceCapacityOptimized", "LaunchTemplateConfigs": [
                 {"LaunchTemplateSpecification": named, "Overrides": [{"InstanceType": "c7i.large"}]}]}  # fmt: skip
    (life.folder / "templates.json").write_text(json.dumps(fleet))
    life.verb(OPERATOR, "request", "templates.json", "--dry-run", "--new-run")


def volumes(life: Life) -> None:
    made = json.loads(life.verb(OPERATOR, "volume", "create", "--yes", "--zone", "us-west-2a", "--output", "json"))
    life.verb(OPERATOR, "volume", "ls")
    life.verb(ADMINISTRATOR, "iam", "create", "--yes")
    (life.folder / "data").mkdir()
    (life.folder / "data/a").write_text("a")
    life.verb(OPERATOR, "volume", "upload", "data", "--yes", ends=(6,))  # the idle machine is silent, and is ended
    life.verb(OPERATOR, "volume", "prepare", "--yes", "--", "true", ends=(6,))
    life.verb(OPERATOR, "volume", "adopt", made["id"], "--yes")
    life.verb(OPERATOR, "volume", "rm", made["id"], "--yes")


def secrets(life: Life) -> None:
    for store in ("ssm", "secretsmanager"):
        for _ in range(2):  # made, then replaced
            life.verb(OPERATOR, "secret", "put", "TOKEN", "--store", store, typed="value")
        life.verb(OPERATOR, "secret", "ls")
        life.verb(OPERATOR, "secret", "rm", "TOKEN", "--store", store, "--yes")


def a_sweep(life: Life) -> None:
    (life.folder / "list.json").write_text(json.dumps([{"lr": 1}, {"lr": 2}]))
    for engine in ("spot-fleet", "ec2-fleet"):
        life.job(f'[fleet]\nengine = "{engine}"\n')
        life.verb(BOTH, "sweep", "run", "list.json", "--yes", "--parallel", "1", "--new-run")
        life.cloud.rules.tick()
        life.verb(OPERATOR, "sweep", "status")
        life.verb(OPERATOR, "sweep", "report", "--metric", "loss", ends=(0, 2, 4))  # no run has said a metric
        life.verb(OPERATOR, "sweep", "scale", "day", "2", "--yes")
        life.verb(OPERATOR, "sweep", "retry", "day", ends=(0, 4, 8))  # no run has failed
        life.verb(OPERATOR, "cancel", "--yes")


def file_systems(life: Life) -> None:
    made = json.loads(life.verb(OPERATOR, "results", "create-efs", "--yes", "--output", "json"))
    life.job(f'[store]\nresults = "efs://{made["file_system"]}"\n')
    life.verb(OPERATOR, "request", "--dry-run", "--new-run")
    life.verb(OPERATOR, "results", "delete-efs", made["file_system"], "--yes")


def batch(life: Life) -> None:
    life.job()
    life.verb(BOTH, "batch", "create", "--yes")
    life.verb(OPERATOR, "batch", "create", "--yes")  # looks at the roles that are there
    life.verb(OPERATOR, "batch", "image", "push")
    (life.folder / "job.toml").write_text(JOB.replace('image = "public.example/spotheal:1"', ""))
    life.verb(OPERATOR, "batch", "create", "--dry-run")  # looks for the image
    life.job()
    life.verb(OPERATOR, "batch", "submit", "--yes")
    life.verb(OPERATOR, "batch", "status")
    for _ in range(60):  # until a container has said something
        life.verb(OPERATOR, "batch", "logs")
        if any("logs:GetLogEvents" in text for _, text in life.asked):
            break
        time.sleep(0.5)
    life.verb(OPERATOR, "batch", "cancel", "--yes")
    life.job("attempts = 5\n")
    life.verb(BOTH, "batch", "create", "--yes")
    life.verb(BOTH, "batch", "delete", "--yes")


def the_end(life: Life) -> None:
    life.verb(ADMINISTRATOR, "iam", "delete", "--job", "day", "--yes")
    life.verb(ADMINISTRATOR, "iam", "delete", "--yes")


DAYS: tuple[Callable[[Life], None], ...] = (
    a_job, a_job_with_every_option, volumes, secrets, a_sweep, file_systems, batch, the_end,
)  # fmt: skip


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory, wheels: Wheelhouse) -> Iterator[Life]:
    """All days, one after the other, in one account."""
    folder = tmp_path_factory.mktemp("operator")
    with pytest.MonkeyPatch.context() as patched, Cloud(
        tmp_path_factory.mktemp("cloud"), REGION, tuple(f"{REGION}{letter}" for letter in "abcd"), 0,
        latencies=QUICK, make_machine=Idle,
    ) as cloud:  # fmt: skip
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patched.delenv(name)
        for name, value in {**speaking_to(cloud), "HOME": str(folder / "home")}.items():
            patched.setenv(name, value)
        patched.setattr(account, "IAM_SECONDS", 0.0)
        patched.setattr(account, "BUCKET_SECONDS", 0.0)
        patched.setattr(prerequisites, "IAM_SECONDS", 0.0)
        patched.setattr(rescue, "_ROLE_SECONDS", 0.0)
        patched.setattr(filling, "_LOOK_SECONDS", 0.05)
        patched.setattr(filling, "_SILENT_SECONDS_MAX", 0.1)
        loader = functools.cache(botocore.loaders.create_loader)  # each verb would read EC2's model again
        patched.setattr(botocore.loaders, "create_loader", loader)
        patched.setattr(wheelhouse, "build", lambda *_, **__: wheels)
        cloud.endpoint.efs.seconds = efs.Seconds(0, 0, 0)
        cloud.endpoint.account.be_strict()
        job = folder / "job"
        job.mkdir()
        (job / "train.py").write_text("print(1)\n")
        (folder / "docker").write_text(DOCKER)
        (folder / "docker").chmod(0o755)
        patched.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        (folder / "home/.ssh").mkdir(parents=True)
        key = folder / "home/.ssh/id_ed25519"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        for arguments in (["init", "-q"], ["add", "train.py"], ["commit", "-qm", "x"]):
            subprocess.run(
                ["git", "-c", "user.email=a@example.org", "-c", "user.name=a", *arguments], cwd=job, check=True
            )
        (job / ".git/info/exclude").write_text("*\n")
        patched.chdir(job)
        found = Life(cloud, job)
        cloud.endpoint.authorization.on_question = found.note
        for day in DAYS:
            day(found)
        yield found


def test_every_verb_that_asks_aws_is_lived_under_the_printed_policies(life: Life) -> None:
    verbs = {arguments[0] for arguments in life.lived}
    assert set(cli.VERBS) - verbs == {"cloud", "rehearse"}  # which ask no AWS


# -------------------------------------------------------------------------------------- nothing that no verb would need
# (statement, action) -> why no question of a verb needs it
EXPLAINED = {
    ("Look", "sts:GetCallerIdentity"): "AWS asks nothing for it; it is printed because fleetctl calls it",
    ("Look", "kms:DescribeKey"): "asked for a customer key; without it `request` notes that the key was not checked",
    ("Store", "s3:AbortMultipartUpload"): "asked where an upload in parts fails",
    **{("ImageOfBatch", action): "asked by Docker, where it pushes an image" for action in NOT_CALLS
       if action.startswith("ecr:")},
}  # fmt: skip


def documents() -> dict[str, Mapping[str, Any]]:
    """The printed policies by name."""
    scope = policies.Scope(ACCOUNT, REGION, StoreUrl("*", ""))
    every = (*policies.DOCUMENTS[Who.OPERATOR], *policies.DOCUMENTS[Who.ADMINISTRATOR])
    return {make.__name__: make(scope) for make in every}


def needed(life: Life) -> set[tuple[str, str]]:
    """(statement, action) of which some question was allowed by that statement alone, of those that its caller has."""
    have = of_people(policies.Scope(ACCOUNT, REGION, StoreUrl("*", "")))
    found: set[tuple[str, str]] = set()
    for caller, question in life.questions:
        statements = [one for document in have[caller] for one in document["Statement"]]
        by = [one["Sid"] for one in statements if is_allowed([{"Statement": [one]}], question)]
        assert by, (caller, question)
        if len(by) == 1:
            found.add((by[0], question.action))
    return found


def test_without_any_statement_or_action_of_a_printed_policy_some_verb_fails(life: Life) -> None:
    without = needed(life)
    printed = {
        (statement["Sid"], action)
        for document in documents().values()
        for statement in document["Statement"]
        for action in statement["Action"]
    }
    assert sorted(printed - without - EXPLAINED.keys()) == []
    assert sorted(EXPLAINED.keys() & without) == [], "explained, and needed after all"
    assert EXPLAINED.keys() <= printed
