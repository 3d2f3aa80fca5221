"""The two files of `fleetctl init`, as text. Pure. JSON takes no comments: job.toml explains both."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from spotheal.agent.protocol.job_keys import FREE_TABLES, KEYS, REQUIRED, Key
from spotheal.fleet.account.init import HOURS, KEY_NAME, Choice, Offer
from spotheal.fleet.account.network import SSH_GROUP
from spotheal.fleet.run.table import table

_WIDTH = 118
# The keys that people look for first: shown with their default, commented out, next to the chosen values.
_USEFUL = {
    "job": ("revision", "resume_command", "setup", "directory", "keep", "python"),
    "volume": ("snapshot",),
    "fleet": ("engine", "on_demand_after", "ssh_from", "public_key"),
    "limits": ("failures", "silent", "hours", "dollars"),
    "store": ("url", "results"),
    "notify": ("webhook", "sns"),
}


def fleet_document(choice: Choice) -> dict[str, Any]:
    """A SpotFleetRequestConfig that the aws CLI accepts unchanged once the named resources exist."""
    document: dict[str, Any] = {
        "IamFleetRole": choice.fleet_role,
        "AllocationStrategy": "priceCapacityOptimized",
        "TargetCapacity": 1,
        "Type": "maintain",
    }
    if choice.wishes.need.max_price:
        document["SpotPrice"] = f"{choice.wishes.need.max_price:g}"
    document["LaunchSpecifications"] = [_specification(choice, offer) for offer in choice.types]
    return document


def _specification(choice: Choice, offer: Offer) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "ImageId": choice.image.id,
        "InstanceType": offer.type.name,
        "SubnetId": ", ".join(offer.subnets),
        "SecurityGroups": [{"GroupName": SSH_GROUP}],
        "IamInstanceProfile": {"Arn": choice.profile},
    }
    return spec | ({"KeyName": KEY_NAME} if choice.key_file else {})


def fleet_text(choice: Choice) -> str:
    return json.dumps(fleet_document(choice), indent=2) + "\n"


# ------------------------------------------------------------------------------------------------------------ job.toml
def job_values(choice: Choice) -> dict[tuple[str, str], Any]:
    """The values in job.toml, by table and key."""
    wishes = choice.wishes
    values: dict[tuple[str, str], Any] = {
        ("job", "name"): wishes.name,
        ("job", "repository"): wishes.repository,
        ("job", "command"): list(wishes.command),
        ("job", "setup"): [list(command) for command in wishes.environment.setup],
        ("job", "region"): choice.region,
        ("job", "gpus"): wishes.need.gpus,
        ("job", "gpu_memory_gib"): _plain(wishes.need.gpu_memory),
        ("volume", "size_gib"): wishes.volume_gib,
        ("fleet", "ssh_from"): choice.ssh_from,
        ("fleet", "public_key"): choice.key_file,
        ("limits", "hours"): _plain(wishes.hours),
        ("limits", "dollars"): _plain(choice.dollars),
    }
    ready = {(key.table, key.name): key for key in KEYS if key.ready}
    return {place: value for place, value in values.items() if place in ready and value not in ("", [], 0)}


def _plain(number: float) -> float | int:
    return int(number) if float(number).is_integer() else number


def reasons(choice: Choice) -> dict[tuple[str, str], str]:
    """The reason of each value."""
    wishes = choice.wishes
    checkout = 'the commit of this checkout travels with the run: no git host, no token; "https://…" clones instead'
    prices = [offer.spot for offer in choice.types if offer.spot]
    proposed = f"proposed: {wishes.hours:g} h of the dearest type chosen, at today's price, and a fifth"
    return {
        ("job", "name"): "in tags, in the store and in every verb; two jobs never share one",
        ("job", "repository"): checkout if wishes.repository == "." else "cloned on each instance",
        ("job", "command"): "as given; a list, no shell reads it",
        ("job", "setup"): wishes.environment.reason,
        ("job", "region"): "so that tomorrow's shell finds the job",
        ("job", "gpus"): "a machine with fewer, or broken ones, leaves at once, and its type is not used again",
        ("job", "gpu_memory_gib"): "as given, of each GPU",
        ("volume", "size_gib"): "datasets and checkpoints; survives every instance, costs about "
        f"${wishes.volume_gib * 0.08:.2f} a month until it is deleted",
        ("fleet", "ssh_from"): "this machine's address: ssh is open to it alone",
        ("fleet", "public_key"): f"imported as key pair {KEY_NAME}",
        ("limits", "hours"): "proposed; the run saves and ends then" if wishes.hours == HOURS else "as given",
        ("limits", "dollars"): proposed if wishes.dollars is None and prices else "as given",
    }


def job_text(choice: Choice, date: str) -> str:
    values, comments = job_values(choice), reasons(choice)
    lines = [_comment(line) for line in header(choice, date)]
    for name in dict.fromkeys(key.table for key in KEYS):
        key_lines = [line for key in KEYS if key.table == name for line in _key_lines(key, values, comments)]
        if key_lines:
            has_values = any(not line.startswith("#") for line in key_lines)
            lines += ["", f"[{name}]" if has_values or name == "job" else f"# [{name}]", *key_lines]
    lines += ["", f"# [environment]   # {FREE_TABLES['environment']}", '# OMP_NUM_THREADS = "4"']
    return "\n".join(lines) + "\n"


def _comment(line: str) -> str:
    return f"# {line}".rstrip()


def _wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` characters; a command that fits in a line is not split."""
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


def _key_lines(key: Key, values: dict[tuple[str, str], Any], comments: dict[tuple[str, str], str]) -> list[str]:
    place = (key.table, key.name)
    if place in values:
        text = f"{key.name} = {toml(values[place])}"
        reason = comments.get(place, "")
        return [*(_comment(part) for part in _wrap(reason, _WIDTH - 2)), text]
    if key.ready and key.name in _USEFUL.get(key.table, ()) and key.default is not REQUIRED:
        text = f"# {key.name} = {toml(key.default)}"
        return [text if len(text) + len(key.says) + 4 > _WIDTH else f"{text}   # {key.says}"]
    return []


def toml(value: Any) -> str:
    """A TOML value; a basic string is like JSON's, except DEL, which TOML wants escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")


def header(choice: Choice, date: str) -> list[str]:
    """The values of spot_fleet_config.json and their reasons, in lines without the comment mark."""
    account = f"account {choice.account}, {choice.region}" if choice.account else "no account (offline)"
    lines = [
        f"Written by `fleetctl init` on {date} for {account}. docs/job-toml.md lists every key;",
        "a line that is commented out shows a default.",
        "",
        "spot_fleet_config.json beside this, and why:",
        "",
    ]
    parts: list[tuple[str, str]] = [
        ("ImageId", f"{choice.image.id}  {choice.image.says}"),
        ("InstanceType", f"{len(choice.types)} types, cheapest first: more types, shorter waits for capacity"),
        ("SubnetId", "one in each zone of the VPC that offers the type now: the volume moves to the instance's zone"),
        ("AllocationStrategy", "priceCapacityOptimized: interrupted less than lowestPrice (AWS recommends it)"),
        ("TargetCapacity", "1: the job's volume is attached to one instance; a lost one is replaced (maintain)"),
        ("IamInstanceProfile", "what an instance may do: docs/permissions.md; made by request where it is missing"),
        ("IamFleetRole", "AWS's own role for spot fleets; made by request where it is missing"),
        ("SecurityGroups", f"{SSH_GROUP}, made by request: {_opened(choice)}"),
        ("KeyName", f"{KEY_NAME}, imported by request from {choice.key_file}" if choice.key_file else
         "none: no public key in ~/.ssh; `fleetctl ssh` sends a key for a minute with EC2 Instance Connect"),
    ]  # fmt: skip
    if choice.wishes.need.max_price:
        parts.append(("SpotPrice", "--max-price; a lower one than the market's means waiting, never paying more"))
    if choice.quota:
        parts.append(("quota", f"{choice.quota} vCPUs"))
    for name, text in parts:
        wrapped = _wrap(text, _WIDTH - 24)
        lines += [f"  {name if not number else '':<19} {line}" for number, line in enumerate(wrapped)]
    lines += ["", *(f"  {line}" for line in types_table(choice).splitlines())]
    for note in choice.notes:
        lines += ["", *_wrap(f"note: {note}", _WIDTH - 2)]
    return lines


def _opened(choice: Choice) -> str:
    return f"ssh from {choice.ssh_from} only" if choice.ssh_from else "nothing open (ssh_from below opens ssh)"


def types_table(choice: Choice) -> str:
    rows = [
        (offer.type.name, offer.type.says() if offer.type.vcpus else "-", _dollars(offer.spot),
         _dollars(offer.on_demand), ", ".join(zone.removeprefix(choice.region) for zone in offer.zones) or "-")
        for offer in choice.types
    ]  # fmt: skip
    return table(("TYPE", "", "SPOT/H FROM", "ON-DEMAND/H", "ZONES"), rows)


def _dollars(price: float | None) -> str:
    return f"${price:.4f}" if price else "-"


def document(choice: Choice, files: list[str]) -> dict[str, Any]:
    """`init --output json`."""
    return {
        "schema_version": 1,
        "files": files,
        "account": choice.account or None,
        "region": choice.region or None,
        "image": {"id": choice.image.id, "parameter": choice.image.parameter or None, "says": choice.image.says},
        "types": [
            {"name": offer.type.name, "vcpus": offer.type.vcpus, "gpus": offer.type.gpus,
             "gpu": offer.type.gpu or None, "spot": offer.spot, "on_demand": offer.on_demand,
             "zones": list(offer.zones), "subnets": list(offer.subnets)}
            for offer in choice.types
        ],
        "ssh_from": choice.ssh_from or None,
        "public_key": choice.key_file or None,
        "hours": choice.wishes.hours or None,
        "dollars": choice.dollars or None,
        "notes": list(choice.notes),
    }  # fmt: skip
