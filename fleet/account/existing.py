"""The resources that a fleet's file names must exist in this account and region: checked before anything is created.

EC2 accepts a fleet request with a deleted image or group, and then launches nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.errors import ConfigError, NotFound, PermissionDenied
from spotheal.fleet.account import types

if TYPE_CHECKING:
    from spotheal.fleet.files.config import FleetConfig
    from spotheal.fleet.run.session import Session

_ACCOUNT = re.compile(r"arn:aws[a-z-]*:[a-z0-9-]*:[a-z0-9-]*:(\d{12}):")
WRITTEN_FOR_ANOTHER = (
    "was the file written for another account or region, or was this deleted since? `fleetctl init --force` writes it "
    "for this account and region"
)


def check(session: Session, fleet: FleetConfig, templates: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """Notes on resources that could not be checked. ConfigError if an ARN is of another account; NotFound if a subnet,
    an image or a security group does not exist. `templates`: the data of its launch templates. The code that creates
    key pairs and named groups checks those itself."""
    _check_account(session, fleet)
    subnets(session, fleet)
    notes = _check_types(session, fleet)
    specs = [*fleet.specifications, *templates]
    overrides = [override for config in fleet.template_configs for override in config.get("Overrides") or []]
    ids_by_kind = {"image": _images([*specs, *overrides]), "security group": _groups(specs)}
    missing = []
    for kind, ids in ids_by_kind.items():
        try:
            missing += [f"{kind} {resource}" for resource in _missing(session, kind, ids)]
        except PermissionDenied as error:
            if not error.code:
                raise
            notes.append(f"whether {kind} {', '.join(ids)} exists was not checked: these credentials may not list it")
    if missing:
        raise _gone(session, fleet, missing)
    return notes


def _check_types(session: Session, fleet: FleetConfig) -> list[str]:
    """Like `check`, of the instance types. EC2 would refuse the whole request for one of them."""
    try:
        names = fleet.instance_types
        offered = set(types.offered_types(session, names))
        if not (strange := [name for name in names if name not in offered]):
            return []
        all_types = types.offered_types(session)
    except PermissionDenied as error:
        if not error.code:
            raise
        return ["whether the instance types are offered was not checked: these credentials may not list them"]
    close = {name: get_close_matches(name, all_types, 1) for name in strange}
    raise ConfigError(
        f"{fleet.source}: not offered in {session.region}: "
        + ", ".join(f"{name} (did you mean {near[0]}?)" if near else name for name, near in close.items()),
        next_step="correct InstanceType; `aws ec2 describe-instance-type-offerings` lists what the region has",
    )


def subnets(session: Session, fleet: FleetConfig) -> list[dict[str, Any]]:
    """The fleet's subnets as EC2 describes them; NotFound names those that do not exist."""
    subnet_ids = list(fleet.subnets)
    if not subnet_ids:
        return []
    with translated(f"describe {', '.join(subnet_ids)}"):
        pages = session.client("ec2").get_paginator("describe_subnets")
        descriptions = [subnet for page in pages.paginate(Filters=[{"Name": "subnet-id", "Values": subnet_ids}])
                 for subnet in page["Subnets"]]  # fmt: skip
    present = {subnet["SubnetId"] for subnet in descriptions}
    if missing := [f"subnet {subnet_id}" for subnet_id in subnet_ids if subnet_id not in present]:
        raise _gone(session, fleet, missing)
    return descriptions


def _check_account(session: Session, fleet: FleetConfig) -> None:
    accounts = dict.fromkeys(_ACCOUNT.findall(json.dumps(fleet.document)))
    if strange := [account for account in accounts if account != session.account]:
        raise ConfigError(
            f"{fleet.source} is written for account {', '.join(strange)}, and these credentials are of account "
            f"{session.account}",
            next_step="--profile NAME takes the credentials of that account; or `fleetctl init --force` writes the "
            "files for this one",
        )


def _images(places: Iterable[Mapping[str, Any]]) -> list[str]:
    """The ids of images, without `resolve:ssm:…`, which EC2 looks up itself."""
    image_ids = [str(place.get("ImageId") or "") for place in places]
    return list(dict.fromkeys(image for image in image_ids if image.startswith("ami-")))


def _groups(specs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The security groups that are named by id."""
    group_ids = [str(group.get("GroupId") or "") for spec in specs for group in spec.get("SecurityGroups") or []]
    for spec in specs:
        cards = spec.get("NetworkInterfaces") or []
        group_ids += spec.get("SecurityGroupIds") or []
        group_ids += [group_id for card in cards for group_id in card.get("Groups") or []]
    return list(dict.fromkeys(filter(None, group_ids)))


def _missing(session: Session, kind: str, ids: list[str]) -> list[str]:
    """The ids that do not exist. By filter: a describe by ids fails as a whole, and names only one of them."""
    if not ids:
        return []
    ec2 = session.client("ec2")
    with translated(f"look for {kind} {', '.join(ids)}"):
        if kind == "image":
            answer = ec2.describe_images(Filters=[{"Name": "image-id", "Values": ids}])["Images"]
            present = {image["ImageId"] for image in answer}
        else:
            answer = ec2.describe_security_groups(Filters=[{"Name": "group-id", "Values": ids}])["SecurityGroups"]
            present = {group["GroupId"] for group in answer}
    return [resource for resource in ids if resource not in present]


def _gone(session: Session, fleet: FleetConfig, resources: list[str]) -> NotFound:
    return NotFound(
        f"{fleet.source} names {', '.join(resources)}, which is not there in account {session.account}, "
        f"{session.region}",
        next_step=WRITTEN_FOR_ANOTHER,
    )
