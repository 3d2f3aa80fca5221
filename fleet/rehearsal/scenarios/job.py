"""What is rehearsed: an example of our own, or the operator's two files with what this machine demands changed.

The operator's repository and command stay what they are. Changed are: the interpreter where the file names none (or
one of a machine image), the trainer's user, and what exists only in an account (key pairs, groups, subnets, templates,
snapshots, placeholders). Each change is said. Roles stay as named: the rehearsal makes them as `fleetctl request` does.
"""

from __future__ import annotations

import getpass
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spotheal.agent.protocol.errors import ConfigError, NotFound
from spotheal.agent.protocol.job import JobConfig
from spotheal.agent.protocol.secret_reference import SecretReference
from spotheal.fleet.account import network, roles
from spotheal.fleet.files.config import DEFAULT_FLEET_FILE, FleetConfig, job_file_beside, parse_fleet, read_job
from spotheal.fleet.rehearsal.ec2.world import EXAMPLE_IMAGE
from spotheal.fleet.run import secrets
from spotheal.iam import job_roles

REGION = "us-west-2"
STAND_IN_SECRET = "rehearsal"
_ACCOUNT = "123456789012"
_STAND_INS = {"ACCOUNT_NUMBER": _ACCOUNT, "AMI_ID": EXAMPLE_IMAGE, "KEYPAIR_NAME": "rehearsal",
              "SECURITY_GROUP_ID": "sg-0123456789abcdef0"}  # fmt: skip
_IAM_ARN = re.compile(r"(arn:aws[a-z-]*:iam::)\d{12}:")
_PLACEHOLDER = re.compile(r"<([A-Za-z_][A-Za-z0-9_ -]*)>")

# 480 steps of at least 50 ms: half a minute, so that there is a middle to be interrupted in.
EXAMPLE_COMMAND = (
    "python", "-m", "spotheal.training", "--dataset", "digits", "--epochs", "40", "--save-every", "10",
    "--threads", "1", "--step-seconds", "0.05",
)  # fmt: skip
# The same on two ranks, each start of which takes torchrun and three imports of torch: fewer, longer steps.
EXAMPLE_RANKS_COMMAND = (
    "python", "-m", "spotheal.training", "--dataset", "digits", "--epochs", "12", "--save-every", "10",
    "--batch-size", "64", "--threads", "1", "--step-seconds", "0.12", "--device", "cpu", "--scale-lr", "linear",
)  # fmt: skip
EXAMPLE_RANKS = 2
_EXAMPLE_NAME = "digits"
_EXAMPLE_JOB = """\
# The job that `make rehearse` trains. docs/job-toml.md lists every key.
[job]
name = "{name}"
repository = {repository}
command = {command}
{more}
[environment]
OMP_NUM_THREADS = "1"

[volume]
size_gib = 1
"""


@dataclass(frozen=True)
class Rehearsed:
    """The two configurations as they are rehearsed; `notes` say what was changed."""

    fleet: FleetConfig
    job: JobConfig
    fleet_file: Path
    job_file: Path
    notes: tuple[str, ...] = ()


def example(
    folder: Path, *, ranks: bool = False, command: Sequence[str] = (), files: Mapping[str, str] | None = None
) -> Rehearsed:
    """The example: a small repository and two files, written to `folder` for the operator to look at.

    With `ranks` it is distributed: `nproc_per_node = "gpu"`, on machines that show two. `command`: another one than
    the example's own; `files`: what the repository holds, by name.
    """
    repository = folder / "repository"
    repository.mkdir(parents=True)
    repository_files = files or {
        "README": "What an operator's repository would be: here the trainer comes with spotheal.\n"
    }
    for name, text in repository_files.items():
        (repository / name).write_text(text, encoding="utf-8")
    git(repository, "init", "--quiet", "--initial-branch", "main")
    git(repository, "add", *repository_files)
    git(repository, "commit", "--quiet", "--message", "The trainer is spotheal's own")
    job_file, fleet_file = folder / "job.toml", folder / "spot_fleet_config.json"
    words = json.dumps(list(command or (EXAMPLE_RANKS_COMMAND if ranks else EXAMPLE_COMMAND)))
    extra_keys = 'nproc_per_node = "gpu"\n' if ranks else ""
    text = _EXAMPLE_JOB.format(
        name=_EXAMPLE_NAME, repository=json.dumps(str(repository)), command=words, more=extra_keys
    )
    job_file.write_text(text)
    fleet_file.write_text(json.dumps(example_fleet(_EXAMPLE_NAME), indent=2) + "\n")
    return users(fleet_file, job_file)


def example_fleet(name: str) -> dict[str, Any]:
    """The example's SpotFleetRequestConfig for the job `name`, with the roles that `fleetctl init` writes."""
    profile = {"Arn": f"arn:aws:iam::{_ACCOUNT}:instance-profile/{job_roles.job_role(name)}"}
    place = {"AvailabilityZone": "us-west-2a, us-west-2b"}
    return {
        "TargetCapacity": 1,
        "AllocationStrategy": "priceCapacityOptimized",
        "IamFleetRole": f"arn:aws:iam::{_ACCOUNT}:role/{roles.FLEET_ROLE}",
        "LaunchSpecifications": [
            {"ImageId": EXAMPLE_IMAGE, "InstanceType": kind, "Placement": place, "IamInstanceProfile": profile}
            for kind in ("g5.xlarge", "g4dn.xlarge")
        ],
    }


def users(fleet_file: Path | None, job_file: Path | None = None) -> Rehearsed:
    """The operator's files; without `fleet_file` stand-in machines. NotFound and ConfigError as for a request."""
    notes: list[str] = []
    fleet = _fleet(fleet_file, notes) if fleet_file else None
    job_file = job_file or job_file_beside(fleet_file or Path(DEFAULT_FLEET_FILE))
    job = read_job(job_file)
    if fleet is None:
        fleet_file = job_file.with_name(DEFAULT_FLEET_FILE)
        fleet = parse_fleet(json.dumps(example_fleet(job.job.name)), str(fleet_file))
        notes.append(f"there is no {fleet_file}: the rehearsal's own machines stand in for yours")
    assert fleet_file is not None
    return Rehearsed(fleet, _job(job, job_file, notes), fleet_file, job_file, tuple(notes))


def gpus_of(job: JobConfig) -> int:
    """How many GPUs the rehearsed machines show, so that the job finds what it asks for."""
    processes = job.job.nproc_per_node
    ranks = EXAMPLE_RANKS if processes == "gpu" else int(processes) if processes != 1 else 0
    return max(ranks, job.job.gpus, 1 if job.job.gpu_memory_gib else 0)


def git(folder: Path, *arguments: str) -> None:
    """git with an author of its own, whatever the operator's settings are."""
    identity = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER")
           for key, value in (("NAME", "rehearsal"), ("EMAIL", "rehearsal@localhost"))}  # fmt: skip
    environment = {**os.environ, **identity, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    if shutil.which("git") is None:
        raise ConfigError("the program git is not on this machine", next_step="install it: `apt-get install git`")
    process = subprocess.run(
        ["git", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if process.returncode != 0:
        raise ConfigError(f"git {arguments[0]} failed in {folder}: {process.stderr.strip()}")


# ------------------------------------------------------------------------------------------------------------- the job
def _job(job: JobConfig, job_file: Path, notes: list[str]) -> JobConfig:
    table = job.job
    if not table.python or shutil.which(table.python) is None:
        if table.python:
            notes.append(f"[job] python: {table.python} is not on this machine; {sys.executable} is used")
        table = replace(table, python=sys.executable)
    repository = (job_file.parent / table.repository).resolve()
    if table.repository != "." and (table.repository.startswith((".", "/", "~")) or repository.is_dir()):
        repository = Path(table.repository).expanduser() if table.repository.startswith("~") else repository
        table = replace(table, repository=str(repository))
    volume = job.volume
    if volume.snapshot:
        notes.append(f"[volume] snapshot: {volume.snapshot} exists only in your account; the volume begins empty")
        volume = replace(volume, snapshot="")
    if table.repository_secret:
        notes.append("[job] repository_secret: yours is not fetched; git clones with what this machine has")
        table = replace(table, repository_secret="")
    job = _without_secrets(job, notes)
    return replace(job, job=table, volume=volume, cage=replace(job.cage, user=_user()))


def _without_secrets(job: JobConfig, notes: list[str]) -> JobConfig:
    """Real secrets have no business in a rehearsal. Stand-ins lie where `fleetctl secret put` puts them, and the agent
    fetches them; for a secret elsewhere, which the job's own role cannot read, the trainer gets a stand-in."""
    if not job.secrets:
        return job
    notes.append(f"[secrets] {', '.join(job.secrets)}: yours are not fetched; here each is {STAND_IN_SECRET!r}")
    elsewhere = [name for name, text in job.secrets.items() if not is_own_secret(job.job.name, text)]
    remaining = {name: text for name, text in job.secrets.items() if name not in elsewhere}
    stand_ins = dict.fromkeys(elsewhere, STAND_IN_SECRET)
    return replace(job, environment={**job.environment, **stand_ins}, secrets=remaining)


def is_own_secret(job: str, text: str) -> bool:
    """Whether the reference `text` is one that `fleetctl secret put` writes for the job."""
    reference = SecretReference.parse(text)
    prefix = secrets.reference(job, "NAME", reference.service).id.removesuffix("NAME")
    return reference.id.startswith(prefix) and not reference.field


def _user() -> str:
    name = getpass.getuser()
    return name if re.fullmatch(r"[a-z_][a-z0-9_-]{0,31}", name) else "spotheal-trainer"


# ----------------------------------------------------------------------------------------------------------- the fleet
def _fleet(path: Path, notes: list[str]) -> FleetConfig:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise NotFound(
            f"there is no {path}", next_step="`fleetctl rehearse --job job.toml` alone uses machines of the rehearsal"
        ) from None
    except (OSError, UnicodeDecodeError) as fault:
        raise ConfigError(f"{path} cannot be read: {fault}") from None
    filled = fill_placeholders(text)
    if filled != text:
        names = ", ".join(dict.fromkeys(match.group() for match in _PLACEHOLDER.finditer(text)))
        notes.append(
            f"{path.name}: the placeholders {names} are filled in for the rehearsal; `fleetctl request` wants them"
        )
    return parse_fleet(filled, str(path))


def fill_placeholders(text: str) -> str:
    """`<ACCOUNT_NUMBER>` and its like as something that has the form AWS wants, in quotes where they have none."""

    subnets = itertools.count(1)

    def stand_in(match: re.Match[str]) -> str:
        name = match.group(1).upper().replace("-", "_").replace(" ", "_")
        value = _STAND_INS.get(name, "rehearsal")
        if name == "SUBNET_ID":  # each another one, so that `localise` gives them zones in turn
            value = f"subnet-{next(subnets):017x}"
        before = text[: match.start()]
        inside_string = (before.count('"') - before.count('\\"')) % 2 == 1
        return value if inside_string else json.dumps(value)

    return _PLACEHOLDER.sub(stand_in, text)


def localise(fleet: FleetConfig, subnets: dict[str, str], template: str) -> tuple[FleetConfig, list[str]]:
    """`fleet` with what exists only in the operator's account replaced by what exists in the rehearsal's.

    `subnets` are the rehearsal's, by zone; the operator's are given zones in turn. `template` is the name of a launch
    template of the rehearsal.
    """
    document = json.loads(_IAM_ARN.sub(rf"\g<1>{_ACCOUNT}:", json.dumps(fleet.document)))
    notes: list[str] = []
    local = [subnets[zone] for zone in sorted(subnets)]
    theirs = list(dict.fromkeys(fleet.subnets))
    given = {subnet: local[number % len(local)] for number, subnet in enumerate(theirs)} if local else {}
    if given:
        notes.append("subnets and images exist only in your account; the rehearsal spreads subnets over its zones")
    for spec in document.get("LaunchSpecifications", []):
        _replace_subnets(spec, given)
        spec.pop("KeyName", None)
        if spec.get("ImageId"):
            spec["ImageId"] = EXAMPLE_IMAGE
        groups = [group for group in spec.pop("SecurityGroups", []) if group.get("GroupName") == network.SSH_GROUP]
        if groups:  # the one that `request` makes
            spec["SecurityGroups"] = groups
    if document.get("LaunchTemplateConfigs"):
        notes.append("launch templates exist only in your account; the rehearsal uses one of its own in their place")
    for config in document.get("LaunchTemplateConfigs", []):
        config["LaunchTemplateSpecification"] = {"LaunchTemplateName": template, "Version": "$Latest"}
        for override in config.get("Overrides", []):
            _replace_subnets(override, given)
            if override.get("ImageId"):
                override["ImageId"] = EXAMPLE_IMAGE
    return replace(fleet, document=document), notes


def _replace_subnets(place: dict[str, Any], subnets: dict[str, str]) -> None:
    if place.get("SubnetId"):
        named = [part.strip() for part in place["SubnetId"].split(",")]
        place["SubnetId"] = ", ".join(dict.fromkeys(subnets.get(subnet, subnet) for subnet in named))
    for card in place.get("NetworkInterfaces", []):
        if card.get("SubnetId"):
            card["SubnetId"] = subnets.get(card["SubnetId"], card["SubnetId"])
        card.pop("Groups", None)
