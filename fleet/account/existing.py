"""What a fleet's file names must be in this account and region: asked before anything is made.

EC2 takes a fleet request with an image or a group that is gone, and then launches nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.errors import ConfigError, NotFound, PermissionDenied

if TYPE_CHECKING:
    from spotheal.fleet.files.config import FleetConfig
    from spotheal.fleet.run.session import Session

_ACCOUNT = re.compile(r"arn:aws[a-z-]*:[a-z0-9-]*:[a-z0-9-]*:(\d{12}):")
WRITTEN_FOR_ANOTHER = (
    "was the file written for another account or region, or was this deleted since? `fleetctl init --force` writes it "
    "for this account and region"
)


def check(session: Session, fleet: FleetConfig, templates: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """Notes on what could not be looked at. ConfigError if an ARN is of another account; NotFound if a subnet, an
    image or a security group is not there. `templates`: the data of its launch templates. Key pairs and groups by name
    are looked at by the code that makes them."""
    _check_account(session, fleet)
    subnets(session, fleet)
    specs = [*fleet.specifications, *templates]
    overrides = [one for config in fleet.template_configs for one in config.get("Overrides") or []]
    named = {"image": _images([*specs, *overrides]), "security group": _groups(specs)}
    gone, notes = [], []
    for kind, ids in named.items():
        try:
            gone += [f"{kind} {one}" for one in _missing(session, kind, ids)]
        except PermissionDenied as error:
            if not error.code:
                raise
            notes.append(f"whether {kind} {', '.join(ids)} exists was not checked: these credentials may not list it")
    if gone:
        raise _gone(session, fleet, gone)
    return notes


def subnets(session: Session, fleet: FleetConfig) -> list[dict[str, Any]]:
    """The fleet's subnets as EC2 describes them; NotFound that names those that are gone."""
    wanted = list(fleet.subnets)
    if not wanted:
        return []
    with translated(f"describe {', '.join(wanted)}"):
        pages = session.client("ec2").get_paginator("describe_subnets")
        found = [one for page in pages.paginate(Filters=[{"Name": "subnet-id", "Values": wanted}])
                 for one in page["Subnets"]]  # fmt: skip
    there = {one["SubnetId"] for one in found}
    if missing := [f"subnet {one}" for one in wanted if one not in there]:
        raise _gone(session, fleet, missing)
    return found


def _check_account(session: Session, fleet: FleetConfig) -> None:
    accounts = dict.fromkeys(_ACCOUNT.findall(json.dumps(fleet.document)))
    if strange := [one for one in accounts if one != session.account]:
        raise ConfigError(
            f"{fleet.source} is written for account {', '.join(strange)}, and these credentials are of account "
            f"{session.account}",
            next_step="--profile NAME takes the credentials of that account; or `fleetctl init --force` writes the "
            "files for this one",
        )


def _images(places: Iterable[Mapping[str, Any]]) -> list[str]:
    """Without `resolve:ssm:…`, which EC2 looks up itself."""
    named = [str(place.get("ImageId") or "") for place in places]
    return list(dict.fromkeys(one for one in named if one.startswith("ami-")))


def _groups(specs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Those that are named by id."""
    found = [str(group.get("GroupId") or "") for spec in specs for group in spec.get("SecurityGroups") or []]
    for spec in specs:
        cards = spec.get("NetworkInterfaces") or []
        found += [*(spec.get("SecurityGroupIds") or []), *(one for card in cards for one in card.get("Groups") or [])]
    return list(dict.fromkeys(filter(None, found)))


def _missing(session: Session, kind: str, ids: list[str]) -> list[str]:
    """By filter: a describe by ids fails as a whole, and names one of them."""
    if not ids:
        return []
    ec2 = session.client("ec2")
    with translated(f"look for {kind} {', '.join(ids)}"):
        if kind == "image":
            answer = ec2.describe_images(Filters=[{"Name": "image-id", "Values": ids}])["Images"]
            there = {one["ImageId"] for one in answer}
        else:
            answer = ec2.describe_security_groups(Filters=[{"Name": "group-id", "Values": ids}])["SecurityGroups"]
            there = {one["GroupId"] for one in answer}
    return [one for one in ids if one not in there]


def _gone(session: Session, fleet: FleetConfig, named: list[str]) -> NotFound:
    return NotFound(
        f"{fleet.source} names {', '.join(named)}, which is not there in account {session.account}, {session.region}",
        next_step=WRITTEN_FOR_ANOTHER,
    )
