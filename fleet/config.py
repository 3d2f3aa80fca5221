"""The two files of a request: spot_fleet_config.json (AWS's own format) and job.toml. All their faults at once.

Nothing here calls AWS. The fleet's file is held against botocore's service model and against what this project needs
of a fleet; the job's file against `agent.config.KEYS`.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotheal.agent.config import JobConfig, parse_job
from spotheal.agent.errors import ConfigError, NotFound
from spotheal.fleet import jsonfile

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_FLEET_FILE = "spot_fleet_config.json"
DEFAULT_JOB_FILE = "job.toml"
WRAPPER = "SpotFleetRequestConfig"
USER_DATA_PLACEHOLDER = "base64_encoded_bash_script"  # what the article's file has where the script goes
MINIMAL_JOB = """\
[job]
name = "my-job"
repository = "https://github.com/…/….git"   # or "." for this checkout
command = ["python", "train.py"]
"""

_PLACEHOLDER = re.compile(r"<[A-Za-z_][A-Za-z0-9_ -]*>")
_PLACEHOLDER_CURES = {
    "ACCOUNT_NUMBER": "`aws sts get-caller-identity --query Account --output text` prints it",
    "KEYPAIR_NAME": "`aws ec2 describe-key-pairs --query 'KeyPairs[].KeyName'` lists them",
    "SECURITY_GROUP_ID": "`aws ec2 describe-security-groups --query 'SecurityGroups[].[GroupId,GroupName]'` lists them",
    "SUBNET_ID": "`aws ec2 describe-subnets --query 'Subnets[].[SubnetId,AvailabilityZone]'` lists them",
}
_ZONE = re.compile(
    r"([a-z]{2}(?:-[a-z]+)+-\d)[a-z]|([a-z]{2}(?:-[a-z]+)+-\d)-[a-z]+-\d[a-z]"
)  # the second: local zones
_SUBNET = re.compile(r"subnet-[0-9a-f]{8}(?:[0-9a-f]{9})?")
_AMI = re.compile(r"ami-[0-9a-f]{8}(?:[0-9a-f]{9})?")
_ROLE_ARN = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/[\w+=,.@/-]+")


@dataclass(frozen=True)
class FleetConfig:
    """A SpotFleetRequestConfig without its wrapper, checked. `warnings` are worth a line and refuse nothing."""

    document: dict[str, Any]
    source: str
    warnings: tuple[str, ...] = ()

    @property
    def specifications(self) -> list[dict[str, Any]]:
        """The launch specifications; empty where the file uses launch templates."""
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
    def region(self) -> str:
        """The region of the zones, or "" where the file names none."""
        return next((region_of(zone) for zone in self.zones), "")


def split_list(text: str) -> list[str]:
    """AWS's own "us-west-2a, us-west-2b"."""
    return [part.strip() for part in text.split(",") if part.strip()]


def spec_subnets(spec: dict[str, Any]) -> list[str]:
    direct = split_list(spec.get("SubnetId") or "")
    return direct or [card["SubnetId"] for card in spec.get("NetworkInterfaces") or [] if card.get("SubnetId")]


def region_of(zone: str) -> str:
    match = _ZONE.fullmatch(str(zone))
    return (match.group(1) or match.group(2)) if match else ""


# -------------------------------------------------------------------------------------------------------------- the fleet
def read_fleet(path: Path) -> FleetConfig:
    """The fleet's file; NotFound where there is none, ConfigError that lists all its faults."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise NotFound(
            f"there is no {path}",
            next_step="write it as for `aws ec2 request-spot-fleet`; docs/quick-start.md has one to copy",
        ) from None
    except (OSError, UnicodeDecodeError) as fault:
        raise ConfigError(f"{path} cannot be read: {fault}") from None
    return parse_fleet(text, str(path))


def parse_fleet(text: str, source: str = DEFAULT_FLEET_FILE) -> FleetConfig:
    """The fleet that `text` describes; ConfigError that lists all faults: of the JSON, of AWS's shape, of our own needs."""
    from spotheal.fleet.shape import fleet_config_faults

    parsed = jsonfile.parse(text, source)
    faults = list(parsed.faults)
    document: dict[str, Any] = {}
    warnings: list[str] = []
    if isinstance(parsed.value, dict):
        document = parsed.value
        if set(document) == {WRAPPER} and isinstance(document[WRAPPER], dict):
            document = document[WRAPPER]
        unquoted = {match.group() for fault in parsed.faults if (match := _PLACEHOLDER.search(fault.split("\n")[0]))}
        own = [*fleet_config_faults(document), *_placeholder_faults(document, unquoted)]
        own += [] if own and not _walkable(document) else [*_fleet_faults(document), *_place_faults(document)]
        faults += [f"{source}: {fault}" for fault in own]
        warnings = _fleet_warnings(document) if not faults else []
    elif parsed.value is not None or not faults:
        faults.append(f"{source}: must hold one JSON object, AWS's SpotFleetRequestConfig")
    if faults:
        raise ConfigError("\n".join(faults), next_step=f"correct {source}, then `fleetctl validate {source}`")
    return FleetConfig(document, source, tuple(warnings))


def _walkable(document: dict[str, Any]) -> bool:
    """Whether lists are lists and objects are objects, so that our checks can look inside."""
    specs, configs = document.get("LaunchSpecifications", []), document.get("LaunchTemplateConfigs", [])
    if not isinstance(specs, list) or not isinstance(configs, list):
        return False
    for spec in specs:
        if not isinstance(spec, dict) or not isinstance(spec.get("Placement", {}), dict):
            return False
        texts = [
            spec.get("SubnetId", ""),
            spec.get("Placement", {}).get("AvailabilityZone", ""),
            spec.get("UserData", ""),
        ]
        cards = spec.get("NetworkInterfaces", [])
        if not all(isinstance(text, str) for text in texts) or not isinstance(cards, list):
            return False
        if not all(isinstance(card, dict) and isinstance(card.get("SubnetId", ""), str) for card in cards):
            return False
    for config in configs:
        overrides = config.get("Overrides", []) if isinstance(config, dict) else None
        if not isinstance(overrides, list) or not all(isinstance(override, dict) for override in overrides):
            return False
    return True


def _strings(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _strings(item, f"{where}.{name}" if where else name)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _strings(item, f"{where}[{index}]")


def _placeholder_faults(document: dict[str, Any], unquoted: set[str]) -> list[str]:
    places: dict[str, list[str]] = {}
    for where, text in _strings(document):
        for word in _PLACEHOLDER.findall(text):
            places.setdefault(word, []).append(where)
    faults = []
    for word, held in places.items():
        cure = _PLACEHOLDER_CURES.get(
            word.strip("<>").upper().replace("-", "_").replace(" ", "_"), "write the value in its place"
        )
        said = "" if word not in unquoted else " (without quotes)"
        faults.append(f"the placeholder {word}{said} is still in {_few(held)}; {cure}")
    return faults


def _few(places: list[str]) -> str:
    return ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")


def _filled(value: Any) -> bool:
    """Whether a value is there to be judged: placeholders have a fault of their own."""
    return isinstance(value, str) and value != "" and not _PLACEHOLDER.search(value)


def _fleet_faults(document: dict[str, Any]) -> Iterator[str]:
    """What AWS would take and this project cannot: a job has one volume, and one instance may write to it."""
    capacity = document.get("TargetCapacity")
    if isinstance(capacity, int) and not isinstance(capacity, bool) and capacity != 1:
        yield f"TargetCapacity: must be 1, is {capacity}: the job's volume can be attached to one instance"
    if document.get("OnDemandTargetCapacity"):
        yield "OnDemandTargetCapacity: must be left out: this fleet is spot only"
    kind = document.get("Type", "maintain")
    if kind != "maintain":
        yield f'Type: must be "maintain", is {kind!r}: no other type replaces an interrupted instance'
    strategies = document.get("SpotMaintenanceStrategies")
    if isinstance(strategies, dict) and strategies.get("CapacityRebalance"):
        yield "SpotMaintenanceStrategies.CapacityRebalance: must be left out: it runs old and new instance side by side, and both need the volume"
    if document.get("InstanceInterruptionBehavior") == "hibernate":
        yield 'InstanceInterruptionBehavior: must not be "hibernate": AWS gives no two minutes\' notice before it; use "terminate"'
    role = document.get("IamFleetRole")
    if _filled(role) and not _ROLE_ARN.fullmatch(str(role)):
        yield f'IamFleetRole: "{role}" is not of the form arn:aws:iam::123456789012:role/NAME'
    has_specs, has_configs = bool(document.get("LaunchSpecifications")), bool(document.get("LaunchTemplateConfigs"))
    if has_specs and has_configs:
        yield "LaunchSpecifications and LaunchTemplateConfigs: AWS takes one of them; remove the other"
    if not has_specs and not has_configs:
        yield "LaunchSpecifications: is required (or LaunchTemplateConfigs): which instances to launch, and where"


def _place_faults(document: dict[str, Any]) -> Iterator[str]:
    regions: dict[str, str] = {}
    for index, spec in enumerate(document.get("LaunchSpecifications") or []):
        yield from _specification_faults(f"LaunchSpecifications[{index}]", spec, regions)
    for index, config in enumerate(document.get("LaunchTemplateConfigs") or []):
        yield from _template_faults(f"LaunchTemplateConfigs[{index}]", config, regions)
    if len(regions) > 1:
        yield f"zones of several regions: {', '.join(regions.values())}; a fleet lives in one"


def _specification_faults(where: str, spec: dict[str, Any], regions: dict[str, str]) -> Iterator[str]:
    image = spec.get("ImageId")
    if image is None:
        yield f"{where}.ImageId: is required"
    elif _filled(image) and not _AMI.fullmatch(image):
        yield f'{where}.ImageId: "{image}" is not of the form ami-0123456789abcdef0'
    if not spec.get("InstanceType") and not spec.get("InstanceRequirements"):
        yield f"{where}.InstanceType: is required"
    if not spec.get("IamInstanceProfile"):
        yield f"{where}.IamInstanceProfile: is required: without it the agent may not touch the volume; `fleetctl iam` prints its policy"
    data = spec.get("UserData")
    if data and data != USER_DATA_PLACEHOLDER and _filled(data):
        yield f"{where}.UserData: is filled by fleetctl and must be left out; commands of your own go to `setup` in job.toml"
    zones = split_list(spec.get("Placement", {}).get("AvailabilityZone", ""))
    yield from _zone_faults(f"{where}.Placement.AvailabilityZone", zones, regions)
    for subnet in spec_subnets(spec):
        if _filled(subnet) and not _SUBNET.fullmatch(subnet):
            yield f'{where}.SubnetId: "{subnet}" is not of the form subnet-0123456789abcdef0'
    if not zones and not spec_subnets(spec):
        yield f'{where}: names no zone; add Placement.AvailabilityZone (a list such as "us-west-2a, us-west-2b") or SubnetId'
    yield from _weight_faults(where, spec)


def _template_faults(where: str, config: dict[str, Any], regions: dict[str, str]) -> Iterator[str]:
    named = config.get("LaunchTemplateSpecification")
    if not isinstance(named, dict) or not (named.get("LaunchTemplateId") or named.get("LaunchTemplateName")):
        yield f"{where}.LaunchTemplateSpecification: needs LaunchTemplateId or LaunchTemplateName"
    for index, override in enumerate(config.get("Overrides") or []):
        zone = override.get("AvailabilityZone")
        yield from _zone_faults(
            f"{where}.Overrides[{index}].AvailabilityZone", [zone] if isinstance(zone, str) else [], regions
        )
        yield from _weight_faults(f"{where}.Overrides[{index}]", override)


def _zone_faults(where: str, zones: list[str], regions: dict[str, str]) -> Iterator[str]:
    for zone in zones:
        if not _filled(zone):
            continue
        if not _ZONE.fullmatch(zone):
            yield f'{where}: "{zone}" is not of the form us-west-2a'
        else:
            regions.setdefault(region_of(zone), zone)


def _weight_faults(where: str, place: dict[str, Any]) -> Iterator[str]:
    weight = place.get("WeightedCapacity")
    if isinstance(weight, (int, float)) and not isinstance(weight, bool) and weight < 1:
        yield f"{where}.WeightedCapacity: must be 1 or more, is {weight}: with less AWS launches several instances"


def _fleet_warnings(document: dict[str, Any]) -> list[str]:
    found = []
    if document.get("AllocationStrategy") == "lowestPrice":
        found.append(
            'AllocationStrategy "lowestPrice" is interrupted most; "priceCapacityOptimized" is what AWS recommends'
        )
    if document.get("ClientToken"):
        found.append("ClientToken is replaced by one made of the run, so that the same request is never sent twice")
    if document.get("ValidUntil") and document.get("TerminateInstancesWithExpiration") is False:
        found.append("TerminateInstancesWithExpiration is false: after ValidUntil instances go on and cost")
    return found


def region_beside(job_file: Path) -> str:
    """The region of the fleet's file that lies beside `job_file`, "" where it tells none; its faults are not looked at."""
    try:
        document = jsonfile.parse((job_file.parent / DEFAULT_FLEET_FILE).read_text(encoding="utf-8-sig"), "").value
    except (OSError, UnicodeDecodeError):
        return ""
    if not isinstance(document, dict):
        return ""
    document = document.get(WRAPPER, document)
    return FleetConfig(document, "").region if isinstance(document, dict) and _walkable(document) else ""


# ---------------------------------------------------------------------------------------------------------------- the job
def read_job(path: Path) -> JobConfig:
    """The job's file; NotFound with one to copy where there is none, ConfigError that lists all its faults."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise NotFound(
            f"there is no {path}, which says what to run; the least it can hold:\n\n{MINIMAL_JOB}",
            next_step=f"write {path}, or name another with --job FILE",
        ) from None
    except tomllib.TOMLDecodeError as fault:
        raise ConfigError(
            _toml_fault(path, str(fault)), next_step=f"correct {path}; docs/job-toml.md lists every key"
        ) from None
    except (OSError, UnicodeDecodeError) as fault:
        raise ConfigError(f"{path} cannot be read: {fault}") from None
    return parse_job(document, source=str(path))


def _toml_fault(path: Path, said: str) -> str:
    match = re.search(r"\(at line (\d+), column (\d+)\)", said)
    if not match:
        return f"{path}: {said}"
    line, column = int(match.group(1)), int(match.group(2))
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    shown = lines[line - 1].replace("\t", " ") if line <= len(lines) else ""
    what = said[: match.start()].strip()
    return f"{path}:{line}:{column}: {what}\n    {shown}\n    {' ' * (column - 1)}^"


def job_file_beside(fleet_file: Path) -> Path:
    return fleet_file.parent / DEFAULT_JOB_FILE


def read_request(fleet_file: Path, job_file: Path) -> tuple[FleetConfig, JobConfig]:
    """Both files of a request; one ConfigError with the faults of both, NotFound where one is missing."""
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
    if fleet is None or job is None:
        messages = "\n".join(error.message for error in faults)
        raise ConfigError(messages, next_step="; ".join(error.next_step for error in faults if error.next_step))
    return fleet, job
