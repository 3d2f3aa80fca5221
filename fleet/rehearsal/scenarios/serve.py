"""The rehearsal's cloud by itself, for an operator (or a script) to point fleetctl, boto3 or the aws CLI at.

An account with nothing in it but AWS's own default VPC. Instances are real processes that run their user data. What AWS
would do by itself is ordered through `control`: POST <endpoint>/_cloud/ORDER?name=value, answered with JSON.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tempfile
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotheal.agent.protocol.errors import ConfigError, NotFound, PermissionDenied, SpothealError
from spotheal.fleet.rehearsal.scenarios.scenario import (
    Fault,
    Interrupt,
    Kill,
    NextZone,
    NoCapacity,
    Rebalance,
    Throttle,
)
from spotheal.fleet.rehearsal.scenarios.stage import ended_by_sigterm, passed_on

if TYPE_CHECKING:
    from spotheal.fleet.rehearsal.scenarios.api import Endpoint
    from spotheal.fleet.rehearsal.scenarios.cloud import Cloud

ORDERS = ("state", "interrupt", "kill", "rebalance", "no-capacity", "capacity", "throttle", "next-zone", "quota",
          "schedules")  # fmt: skip
NOTICE_SECONDS = 60.0
_PATH = "/_cloud/"
_TAKE_OVER = "take over the lines that it prints: `. ./cloud.env` after `fleetctl cloud --env cloud.env`"
_UNSET = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
          "AWS_CREDENTIAL_EXPIRATION")  # fmt: skip


def environment(
    endpoint: Endpoint, region: str, ssh_config: Path | None = None, credentials: Path | None = None
) -> dict[str, str]:
    """What a client of the local cloud has in its environment: the key of an operator who is an administrator too.

    Or a file of keys, `credentials`, so that what is printed holds no secret.
    """
    keys = {} if credentials else endpoint.key_of_person().environment
    hosts = ",".join(filter(None, [os.environ.get("NO_PROXY", ""), "127.0.0.1"]))
    return {
        "AWS_ENDPOINT_URL": endpoint.url,
        **keys,
        "AWS_REGION": region,
        "AWS_DEFAULT_REGION": region,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": str(credentials or os.devnull),
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": hosts,
        "no_proxy": hosts,
        **({"SPOTHEAL_SSH_CONFIG": str(ssh_config)} if ssh_config else {}),
    }


def shell_lines(environment: Mapping[str, str]) -> str:
    """For `eval`: the environment, and what would be stronger than it taken away."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    return "\n".join([f"unset {' '.join(_UNSET)}", *lines]) + "\n"


@contextmanager
def serving(region: str, folder: Path | None = None, seed: int = 0, strict: bool = False) -> Iterator[Cloud]:
    """A cloud that is up; all of it is gone on leaving, its files too where `folder` is None."""
    from spotheal.fleet.rehearsal.scenarios.cloud import Cloud

    place = folder or Path(tempfile.mkdtemp(prefix="spotheal-cloud-"))
    _keep_private(place)
    zones = tuple(f"{region}{letter}" for letter in "abcd")
    # As an image with torch has it: the interpreter that `python` means on the instances is this one.
    variables = passed_on() | {"CONDA_PREFIX": sys.prefix}
    try:
        with Cloud(place.resolve(), region, zones, seed, variables) as cloud:
            if strict:
                cloud.endpoint.account.be_strict()
            cloud.shells.is_on = cloud.shows_gpus = True
            cloud.endpoint.control = lambda order, given: obey(cloud, order, given)
            yield cloud
    finally:
        if folder is None:
            shutil.rmtree(place, ignore_errors=True)


def _keep_private(folder: Path) -> None:
    """A folder that no other user enters: keys of the cloud and the machines' environments lie in it.

    ConfigError if it has files already and others may look into it: its permissions are not ours to change.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_mode & 0o077:
        if any(folder.iterdir()):
            raise ConfigError(
                f"{folder} is not empty, and other users of this machine may look into it",
                next_step=f"`chmod 700 {shlex.quote(str(folder))}`, or name a new folder with --keep DIR",
            )
        folder.chmod(0o700)


def serve(region: str, folder: Path | None, ready: Callable[[Cloud], None]) -> None:
    """Serve until Ctrl-C or SIGTERM; `ready` is called once, when the endpoint answers.

    This process's own AWS settings are dropped: moto makes boto3 sessions, and the operator's profile is none here.
    """
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    with ExitStack() as stack:
        stack.enter_context(suppress(KeyboardInterrupt))
        stack.enter_context(ended_by_sigterm())
        stack.enter_context(redirect_stdout(sys.stderr))  # moto prints
        ready(stack.enter_context(serving(region, folder, strict=True)))
        threading.Event().wait()


# ------------------------------------------------------------------------------------------------------------- control
def obey(cloud: Cloud, order: str, arguments: dict[str, str]) -> dict[str, Any]:
    """What an order came to; ValueError or KeyError where it makes no sense."""
    rules = cloud.rules
    if order == "state":
        return state(cloud)
    if order == "capacity":
        rules.no_capacity((), 0.0)
        return {"said": "capacity everywhere"}
    if order == "quota":
        limit = arguments.get("instances", "")
        rules.limit_instances(int(limit) if limit else None)
        return {"said": f"at most {limit} instances" if limit else "no limit of instances"}
    if order == "schedules":
        count = cloud.endpoint.schedules.bring_forward()
        return {"said": f"the time of {count} schedules has come" if count else "there is no schedule"}
    live = [one.id for one in rules.instances() if one.state in ("pending", "running") and not one.leaving]
    instance = arguments.get("instance") or (live[-1] if live else "")
    fault = _fault(order, arguments)
    if not isinstance(fault, (NoCapacity, Throttle, NextZone)) and instance not in live:
        raise KeyError(f"no instance {instance} is running" if instance else "no instance is running")
    return {"said": cloud.make(fault, instance), "instance": instance or None}


def _fault(order: str, arguments: dict[str, str]) -> Fault:
    seconds = float(arguments["seconds"]) if arguments.get("seconds") else None
    faults: dict[str, Callable[[], Fault]] = {
        "interrupt": lambda: Interrupt(NOTICE_SECONDS if seconds is None else seconds),
        "kill": Kill,
        "rebalance": Rebalance,
        "no-capacity": lambda: NoCapacity(60.0 if seconds is None else seconds),
        "throttle": lambda: Throttle(10.0 if seconds is None else seconds, 0.5, 1),
        "next-zone": lambda: NextZone(True),
    }
    if order not in faults:
        raise ValueError(f"{order!r} is no order; there are {', '.join(ORDERS)}")
    return faults[order]()


def state(cloud: Cloud) -> dict[str, Any]:
    """All that costs or is left, as AWS would list it."""
    rules = cloud.rules
    return {
        "instances": [
            {"id": instance.id, "state": instance.state, "zone": instance.zone, "type": instance.type,
             "reason": instance.reason[0],
             "folder": str(machine.folder) if (machine := cloud.machines.get(instance.id)) else None}
            for instance in rules.instances()
        ],
        "volumes": [{"id": volume.id, "state": volume.state, "zone": volume.zone, "tags": dict(volume.tags)}
                    for volume in rules.volumes()],
        "snapshots": [{"id": snapshot.id, "state": snapshot.state, "tags": dict(snapshot.tags)}
                      for snapshot in rules.snapshots()],
        "fleets": [{"id": fleet.id, "state": fleet.state} for fleet in rules.fleets()],
        "templates": [template.name for template in rules.world.templates.all()],
        "schedules": cloud.endpoint.schedules.names(),
        "calls": rules.counts(),
    }  # fmt: skip


def _signature(url: str) -> dict[str, str]:
    """Headers that sign a POST of nothing, as a service would want it."""
    import botocore.session
    from botocore.auth import SigV4Auth
    from botocore.awsrequest import AWSRequest

    from spotheal.agent.aws.clients import translated

    with translated("read the key of the local cloud"):
        credentials = botocore.session.Session().get_credentials()
    if credentials is None:
        raise PermissionDenied("there is no key of the local cloud here", next_step=_TAKE_OVER)
    request = AWSRequest("POST", url)
    SigV4Auth(credentials.get_frozen_credentials(), "spotheal-cloud", "us-east-1").add_auth(request)
    return dict(request.headers)


def send(order: str, arguments: dict[str, str]) -> dict[str, Any]:
    """Give an order to the local cloud that AWS_ENDPOINT_URL names."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "").rstrip("/")
    if urllib.parse.urlsplit(endpoint).hostname not in ("127.0.0.1", "localhost"):
        raise ConfigError(
            "AWS_ENDPOINT_URL names no cloud on this machine",
            next_step=f"start one with `fleetctl cloud`, and {_TAKE_OVER}",
        )
    url = f"{endpoint}{_PATH}{urllib.parse.quote(order)}?{urllib.parse.urlencode(arguments)}"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(urllib.request.Request(url, headers=_signature(url), method="POST"), timeout=30) as answer:
            document: dict[str, Any] = json.load(answer)
            return document
    except urllib.error.HTTPError as error:
        if error.code == 403:
            message = error.read().decode("utf-8", "replace")
            raise PermissionDenied(f"{endpoint} refuses the key in use: {message}", next_step=_TAKE_OVER) from None
        raise NotFound(error.read().decode("utf-8", "replace") or str(error)) from None
    except (OSError, ValueError) as error:
        raise SpothealError(f"{endpoint} does not answer: {error}", next_step="is `fleetctl cloud` running?") from None
