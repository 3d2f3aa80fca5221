"""The two files of a request: spot_fleet_config.json (AWS's own format) and job.toml. All their faults at once.

Nothing here calls AWS. The fleet's file is held against botocore's service model and against what this project needs
of a fleet; the job's file against `agent.job_keys.KEYS`.
"""

from __future__ import annotations

import copy
import json
import os
import re
import stat
import sys
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from spotheal.agent.protocol.errors import ConfigError, NotFound
from spotheal.agent.protocol.job import JobConfig, parse_job
from spotheal.agent.protocol.job_values import policy_fault
from spotheal.fleet.files import jsonfile, rescue, webhook
from spotheal.fleet.files.checks import fleet_faults, fleet_warnings, is_walkable, placeholder_faults
from spotheal.fleet.files.places import region_of, spec_subnets, split_list
from spotheal.fleet.files.values import value_faults, value_warnings
from spotheal.fleet.run import ec2fleet

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_FLEET_FILE = "spot_fleet_config.json"
DEFAULT_JOB_FILE = "job.toml"
WRAPPER = "SpotFleetRequestConfig"
MINIMAL_JOB = """\
[job]
name = "my-job"
repository = "https://github.com/…/….git"   # or "." for this checkout
command = ["python", "train.py"]
"""


@dataclass(frozen=True)
class FleetConfig:
    """A SpotFleetRequestConfig without its wrapper, checked. `warnings` are worth a line and refuse nothing."""

    document: dict[str, Any]
    source: str
    warnings: tuple[str, ...] = ()

    @property
    def specifications(self) -> list[dict[str, Any]]:
        """The launch specifications; empty if the file uses launch templates."""
        return copy.deepcopy(self.document.get("LaunchSpecifications") or [])

    @property
    def template_configs(self) -> list[dict[str, Any]]:
        return copy.deepcopy(self.document.get("LaunchTemplateConfigs") or [])

    @property
    def instance_types(self) -> tuple[str, ...]:
        places = [*self.specifications, *(o for c in self.template_configs for o in c.get("Overrides") or [])]
        return tuple(dict.fromkeys(place["InstanceType"] for place in places if place.get("InstanceType")))

    @property
    def zones(self) -> tuple[str, ...]:
        """The zones the file names; those of its subnets are known to AWS only."""
        named = [
            zone
            for spec in self.specifications
            if not spec.get("SubnetId")
            for zone in split_list(spec.get("Placement", {}).get("AvailabilityZone", ""))
        ]
        named += [
            override["AvailabilityZone"]
            for config in self.template_configs
            for override in config.get("Overrides") or []
            if override.get("AvailabilityZone")
        ]
        return tuple(dict.fromkeys(named))

    @property
    def subnets(self) -> tuple[str, ...]:
        named = [subnet for spec in self.specifications for subnet in spec_subnets(spec)]
        named += [
            override["SubnetId"]
            for config in self.template_configs
            for override in config.get("Overrides") or []
            if override.get("SubnetId")
        ]
        return tuple(dict.fromkeys(named))

    @property
    def profiles(self) -> tuple[str, ...]:
        """The names of the instance profiles in the launch specifications; only AWS knows those of templates."""
        profiles = [spec.get("IamInstanceProfile") or {} for spec in self.specifications]
        names = (profile.get("Name") or profile.get("Arn", "").rpartition("/")[2] for profile in profiles)
        return tuple(dict.fromkeys(names))

    @property
    def region(self) -> str:
        """The region of the zones, or "" if the file names no zone."""
        return next((region_of(zone) for zone in self.zones), "")


def text_of(path: Path) -> str:
    """The text of a file. ConfigError if it is no regular file, such as a named pipe, which would block; OSError and
    UnicodeDecodeError as in any read."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0))
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        kind = "a folder" if stat.S_ISDIR(mode) else "a named pipe" if stat.S_ISFIFO(mode) else "a device"
        raise ConfigError(f"{path} is {kind}, no file", next_step="write it into a file and name that")
    with os.fdopen(fd, "rb") as file:
        return file.read().decode("utf-8-sig")


def _unreadable(path: Path, fault: OSError | UnicodeDecodeError) -> ConfigError:
    if isinstance(fault, UnicodeDecodeError):
        return ConfigError(f"{path} cannot be read: it is no text in UTF-8", next_step="save it as UTF-8 text")
    return ConfigError(f"{path} cannot be read: {fault.strerror or fault}", next_step="look at it with `ls -l`")


# ------------------------------------------------------------------------------------------------------------ the fleet
def read_fleet(path: Path) -> FleetConfig:
    """The fleet's file; NotFound if it does not exist, ConfigError that lists all its faults."""
    try:
        text = text_of(path)
    except FileNotFoundError:
        raise NotFound(
            f"there is no {path}",
            next_step='`fleetctl init --command "python train.py"` writes it; or any that the aws CLI takes',
        ) from None
    except (OSError, UnicodeDecodeError) as fault:
        raise _unreadable(path, fault) from None
    return parse_fleet(text, str(path))


def parse_fleet(text: str, source: str = DEFAULT_FLEET_FILE) -> FleetConfig:
    """The fleet that `text` describes; ConfigError that lists all faults: of the JSON, AWS's shape and our rules."""
    from spotheal.fleet.files.shape import fleet_config_faults

    parsed = jsonfile.parse(text, source)
    faults = list(parsed.faults)
    document: dict[str, Any] = {}
    warnings: list[str] = []
    if isinstance(parsed.value, dict):
        document = parsed.value
        if set(document) == {WRAPPER} and isinstance(document[WRAPPER], dict):
            document = document[WRAPPER]
        content_faults = [*fleet_config_faults(document), *placeholder_faults(document)]
        if is_walkable(document):
            content_faults += [*fleet_faults(document), *value_faults(document, datetime.now(timezone.utc))]
        faults += [f"{source}: {fault}" for fault in content_faults]
        warnings = [*fleet_warnings(document), *value_warnings(document)] if not faults else []
    elif parsed.value is not None or not faults:
        faults.append(f"{source}: must hold one JSON object, AWS's SpotFleetRequestConfig")
    if faults:
        raise ConfigError("\n".join(faults), next_step=f"correct {source}, then `fleetctl validate {source}`")
    return FleetConfig(document, source, tuple(warnings))


def region_beside(job_file: Path) -> str:
    """The region in the fleet's file next to `job_file`, "" if it names none; its faults are not checked."""
    try:
        document = jsonfile.parse(text_of(job_file.parent / DEFAULT_FLEET_FILE), "").value
    except (OSError, UnicodeDecodeError, ConfigError):
        return ""
    if not isinstance(document, dict):
        return ""
    document = document.get(WRAPPER, document)
    return FleetConfig(document, "").region if isinstance(document, dict) and is_walkable(document) else ""


# -------------------------------------------------------------------------------------------------------------- the job
def read_job(path: Path) -> JobConfig:
    """The job's file; NotFound with an example if it does not exist, ConfigError that lists all its faults."""
    try:
        document = tomllib.loads(text_of(path))
    except FileNotFoundError:
        raise NotFound(
            f"there is no {path}, which says what to run; the least it can hold:\n\n{MINIMAL_JOB}",
            next_step=f"write {path} (`fleetctl init` does), or name another with --job FILE",
        ) from None
    except tomllib.TOMLDecodeError as fault:
        raise ConfigError(
            _toml_fault(path, str(fault)), next_step=f"correct {path}; docs/job-toml.md lists every key"
        ) from None
    except (OSError, UnicodeDecodeError) as fault:
        raise _unreadable(path, fault) from None
    except (ValueError, RecursionError):  # digits by the thousand, or brackets
        raise ConfigError(f"{path} holds a number too long, or brackets too deep, to be read") from None
    job = _with_policy(parse_job(document, source=str(path)), path)
    if webhook_fault := webhook.fault(job.notify.webhook):
        raise ConfigError(
            f"{path}: [notify] webhook: {webhook_fault}", next_step="write an address that the instance can reach"
        )
    return job


def is_job_file(path: Path) -> bool:
    """Whether a file has the form of a job.toml; its faults are not checked."""
    try:
        table = tomllib.loads(text_of(path)).get("job")
    except (OSError, ValueError, RecursionError, ConfigError):
        return False
    return isinstance(table, dict) and {"name", "repository", "command"} <= table.keys()


def _with_policy(job: JobConfig, path: Path) -> JobConfig:
    """`cage.trainer_policy` names a file next to job.toml; an instance gets its content, on one line."""
    named = job.cage.trainer_policy
    if not named or named.startswith("{"):
        return job
    file = path.parent / named
    try:
        text = json.dumps(json.loads(text_of(file)), separators=(",", ":"))
    except OSError as error:
        raise ConfigError(
            f"{path}: [cage] trainer_policy: {file} cannot be read: {error.strerror}",
            next_step="write an IAM policy there: what the trainer may do, of what its role spotheal-trainer-JOB may",
        ) from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path}: [cage] trainer_policy: {file} is no JSON") from None
    if fault := policy_fault(text):
        raise ConfigError(f"{path}: [cage] trainer_policy: {file} {fault}")
    return replace(job, cage=replace(job.cage, trainer_policy=text))


def _toml_fault(path: Path, message: str) -> str:
    match = re.search(r"\(at line (\d+), column (\d+)\)", message)
    if not match:
        return f"{path}: {message}"
    line, column = int(match.group(1)), int(match.group(2))
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    excerpt = lines[line - 1].replace("\t", " ") if line <= len(lines) else ""
    reason = message[: match.start()].strip()
    return f"{path}:{line}:{column}: {reason}\n    {excerpt}\n    {' ' * (column - 1)}^"


def job_file_beside(fleet_file: Path) -> Path:
    return fleet_file.parent / DEFAULT_JOB_FILE


def read_request(fleet_file: Path, job_file: Path) -> tuple[FleetConfig, JobConfig]:
    """Both files of a request; one ConfigError with the faults of both, NotFound if one is missing."""
    faults: list[ConfigError] = []
    fleet: FleetConfig | None = None
    job: JobConfig | None = None
    try:
        fleet = read_fleet(fleet_file)
    except ConfigError as error:
        faults.append(error)
    try:
        job = read_job(job_file)
    except ConfigError as error:
        faults.append(error)
    if fleet is not None and job is not None:
        _check_together(fleet, job, job_file)
    if fleet is None or job is None:
        messages = "\n".join(error.message for error in faults)
        raise ConfigError(messages, next_step="; ".join(error.next_step for error in faults if error.next_step))
    return fleet, job


def _check_together(fleet: FleetConfig, job: JobConfig, job_file: Path) -> None:
    """Faults that only both files together show."""
    from spotheal.iam.job_roles import job_of, job_role

    for profile in fleet.profiles:
        if (other_job := job_of(profile)) not in ("", job.job.name):
            raise ConfigError(
                f"{fleet.source} names the instance profile {profile} of job {other_job}, but {job_file.name} is for "
                f"job {job.job.name}: its machines could not use their own store",
                next_step=f'"Name": "{job_role(job.job.name)}" in {fleet.source}; or `fleetctl init --force` writes '
                "both files again",
            )
    if job.fleet.engine == "ec2-fleet" and (unknown := ec2fleet.check(fleet.document)):
        raise ConfigError(
            "\n".join(f"{fleet.source}: {fault}" for fault in unknown),
            next_step=f'take it out, or set [fleet] engine = "spot-fleet" in {job_file}',
        )
    if faults := rescue.faults(job, bool(fleet.template_configs)):
        raise ConfigError("\n".join(f"{job_file}: {fault}" for fault in faults), next_step=f"correct {job_file}")
