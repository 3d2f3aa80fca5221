"""Where a container of AWS Batch is: its job, its attempt, its index, and the host below it as far as it can be told.

Source: AWS Batch User Guide, "Job environment variables"; ECS Developer Guide, "Task metadata endpoint version 4".
"""

from __future__ import annotations

import json
import os
import re
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spotheal.agent.aws.imds import Identity, Metadata
from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol import contract
from spotheal.agent.protocol.errors import ConfigError, NotFound, SpothealError
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.names import LAYOUT, StoreUrl

STORE = "SPOTHEAL_STORE"  # the run's prefix, which `fleetctl batch submit` gives to every container
EFS = "SPOTHEAL_EFS"  # where the job definition mounts the file system; unset without one
_JOB, _ATTEMPT = "AWS_BATCH_JOB_ID", "AWS_BATCH_JOB_ATTEMPT"
_TASK = "ECS_CONTAINER_METADATA_URI_V4"
HOST_SECONDS_MAX = 3.0  # the metadata service may be out of a container's reach (a hop limit of 1)


@dataclass(frozen=True)
class Place:
    """`index` None: no run of a list. `attempt` counts from 1, as Batch does."""

    store: StoreUrl
    job: str
    attempt: int
    index: int | None

    @property
    def name(self) -> str:
        """What stands for the instance in the store: two attempts may share a host, and hosts may be hidden."""
        job, _, _ = self.job.partition(":")
        parts = [job[:8], *([str(self.index)] if self.index is not None else []), str(self.attempt)]
        return "batch-" + "-".join(re.sub(r"[^0-9A-Za-z]", "", part) for part in parts)


def place(environment: Mapping[str, str]) -> Place:
    """ConfigError that names what is missing or makes no sense."""
    url = environment.get(STORE, "")
    try:
        store = StoreUrl.parse(url)
    except ValueError as fault:
        raise ConfigError(
            f"{STORE}: {fault}", next_step="`fleetctl batch submit` sets it; this program runs in its containers"
        ) from None
    attempt = environment.get(_ATTEMPT, "1")
    index = environment.get(contract.BATCH_INDEX) or environment.get(contract.INDEX)
    for name, text in ((_ATTEMPT, attempt), (contract.BATCH_INDEX, index)):
        if text is not None and not (text.isascii() and text.isdigit() and len(text) <= 6):
            raise ConfigError(f"{name} is {text!r} and must be a number", next_step="AWS Batch sets it")
    return Place(store, environment.get(_JOB, "none"), int(attempt), None if index is None else int(index))


def identity(batch_place: Place, metadata: Metadata, region: str) -> tuple[Identity, str]:
    """This container as the store knows it, and the id of its host ("" where it is hidden)."""
    try:
        host = metadata.identity(wait_seconds_max=HOST_SECONDS_MAX)
        return Identity(
            batch_place.name, host.zone, region, host.instance_type, host.account, host.image
        ), host.instance
    except SpothealError:
        task = _task()
        match = re.match(r"arn:[^:]+:ecs:[^:]+:(\d{12}):", str(task.get("TaskARN", "")))
        zone = str(task.get("AvailabilityZone") or "")
        return Identity(batch_place.name, zone, region, "", match.group(1) if match else "", ""), ""


def read_config(s3: Any, place: Place) -> InstanceConfig:
    """What `fleetctl batch submit` has stored for the run. NotFound where there is no such bucket or run."""
    store = Store(s3, place.store)
    body = store.get_bytes(LAYOUT.job_document)
    if body is None:
        raise NotFound(f"there is no run at {place.store}", next_step="`fleetctl batch submit` makes one")
    return InstanceConfig.from_json(body.decode("utf-8", "replace"), source=f"{place.store}/{LAYOUT.job_document}")


def _task() -> dict[str, Any]:
    url = os.environ.get(_TASK, "")
    if not url.startswith("http://"):
        return {}
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{url}/task", timeout=HOST_SECONDS_MAX) as answer:
            task = json.loads(answer.read(1 << 20))
    except (OSError, ValueError):
        return {}
    return task if isinstance(task, dict) else {}
