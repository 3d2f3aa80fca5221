"""Carries out a plan, step by step. Each step may run twice, so an interrupted request can continue anywhere.

The run's documents are stored before anything is created, and the exact request before it is sent: if this process
dies, the next `fleetctl request` finds the run and sends the same request with the same tokens.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.aws.ec2 import TokenUsed
from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import Clock, SystemClock, parse_rfc3339, rfc3339
from spotheal.agent.protocol.errors import Conflict, Retryable, SpothealError
from spotheal.agent.protocol.job_values import seconds
from spotheal.agent.protocol.names import LAYOUT, STATUS_SCHEMA_VERSION, Phase, StoreUrl
from spotheal.agent.protocol.retrying import until_it_works
from spotheal.fleet.account import prerequisites, results_check, roles, volumes
from spotheal.fleet.account.between import OpenBetween
from spotheal.fleet.account.prerequisites import CreateSecurityGroup, ImportKey, OpenSsh, filled
from spotheal.fleet.account.roles import CreateFleetRole, CreateInstanceRole, CreateTrainerRole
from spotheal.fleet.account.service_roles import CreateServiceRole
from spotheal.fleet.files import rescue
from spotheal.fleet.request import plan, repository
from spotheal.fleet.request.bucket import PUBLIC_BLOCKS, bucket_exists
from spotheal.fleet.request.gather import Ready
from spotheal.fleet.run import engine
from spotheal.fleet.run.session import Session
from spotheal.iam.policies import Scope

Say = Callable[[str], None]
_TEMPLATE_SECONDS = 12.0  # until a new launch template is known everywhere
_ROLE_SECONDS = 120.0  # and a new role: as long as Terraform's provider for AWS waits (from memory)
_TRY_SECONDS = 2.0
_YOUNG_ROLE = ("IamFleetRole is invalid", "Invalid IAM Instance Profile")
_TURN_SECONDS = 120.0
_BUCKET_TRIES = 8  # with the waits between them a minute
_BUCKET_TRY_SECONDS = 2.0


def carry_out(session: Session, ready: Ready, clock: Clock, say: Say) -> dict[str, Any]:
    """Carry out every step; returns `{"fleet_id", "volume_id"}`."""
    ids: dict[str, Any] = {}
    values: dict[str, str] = {}  # of the placeholders in later steps
    usable_at = 0.0
    store = Store(session.client("s3"), ready.plan.store)
    for step in ready.plan.steps:
        say(step.says())
        match step:
            case CreateInstanceRole() | CreateFleetRole() | CreateServiceRole() | CreateTrainerRole():
                prerequisites.make(session, step)
                usable_at = clock.monotonic() + prerequisites.IAM_SECONDS
            case CreateSecurityGroup() | OpenSsh() | ImportKey():
                values |= prerequisites.make(session, step)
            case OpenBetween(group):
                prerequisites.make(session, replace(step, group=values.get(group, group)))
            case plan.ShareFolder():
                pass  # the first machine makes the folders
            case plan.CreateBucket(bucket):
                _create_bucket(session, bucket, clock)
            case plan.RecordRun():
                _take_turn(store, ready, clock)
                results_check.probe(session, ready.instance.job, ready.plan.run)
                _record(store, ready, clock)
            case plan.UploadWheels():
                _upload_wheels(store, ready)
            case plan.UploadBundle():
                _upload_bundle(store, ready)
            case plan.CreateVolume(spec):
                ids["volume_id"] = _create_volume(session, spec)
                volumes.await_encrypted(session, ids["volume_id"], spec.kms_key, clock)
            case plan.AdoptVolume(volume, tags):
                session.ec2.tag([volume.id], tags)
                ids["volume_id"] = volume.id
            case plan.KeepVolume(volume):
                ids["volume_id"] = volume.id
            case plan.CreateTemplate(arguments):
                _create_template(session, filled(arguments, values))
            case plan.WriteSweep(entries, source):
                store.put_json(LAYOUT.sweep, {"schema_version": 1, "source": source, "entries": list(entries)})
            case plan.ArmRescue():
                rescue.ensure_role(session.client("iam"), _rescue_scope(session, ready))
            case plan.SendFleet(arguments):
                _await_roles(usable_at - clock.monotonic(), clock, say)
                volume = ids.get("volume_id", "")  # a sweep has none
                until = max(usable_at + _ROLE_SECONDS if usable_at else 0.0, clock.monotonic() + _TEMPLATE_SECONDS)
                ids["fleet_id"] = _send(session, store, ready, filled(arguments, values), volume, clock, until)
    return ids


def _rescue_scope(session: Session, ready: Ready) -> Scope:
    return replace(roles.scope(session, ready.plan.store), job=ready.instance.job.job.name)


def _await_roles(seconds: float, clock: Clock, say: Say) -> None:
    if seconds > 0:
        say(f"waiting {seconds:.0f} s until the new roles are known everywhere")
        clock.sleep(seconds)


def ensure_bucket(session: Session, bucket: str) -> None:
    if not bucket_exists(session, bucket):
        _create_bucket(session, bucket, SystemClock())


def _create_bucket(session: Session, bucket: str, clock: Clock) -> None:
    s3 = session.client("s3")
    location: dict[str, Any] = {}
    if session.region != "us-east-1":  # the only region that refuses its own name here
        location = {"CreateBucketConfiguration": {"LocationConstraint": session.region}}
    try:
        with translated(f"create bucket {bucket}"):
            s3.create_bucket(Bucket=bucket, **location)
    except SpothealError as error:
        if error.code != "BucketAlreadyOwnedByYou":
            raise
    block = dict.fromkeys(PUBLIC_BLOCKS, True)
    rule = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}

    def close() -> None:
        with translated(f"close bucket {bucket} to the public"):
            s3.put_public_access_block(Bucket=bucket, PublicAccessBlockConfiguration=block)
            s3.put_bucket_encryption(Bucket=bucket, ServerSideEncryptionConfiguration={"Rules": [rule]})

    until_it_works(
        close, clock, tries_max=_BUCKET_TRIES, pause=lambda tries: _BUCKET_TRY_SECONDS * tries,
        # AWS answers so for a new bucket (terraform-provider-aws issues 7628 and 11795).
        passes=lambda error: error.code in ("NoSuchBucket", "OperationAborted"),
    )  # fmt: skip


def _take_turn(store: Store, ready: Ready, clock: Clock) -> None:
    """Of two requests for one job at the same moment only one goes on: two would be two fleets, and two bills.

    Raises Conflict for the other. If a request ended before it wrote anything, its turn is free again: at once if it
    ran on this machine, else after `_TURN_SECONDS`.
    """
    if not ready.turn:
        return
    of_job = Store(store.client, StoreUrl(store.url.bucket, store.url.prefix.rpartition("/")[0]))
    moment = clock.now()

    def is_stale(claim: Mapping[str, Any]) -> bool:
        run, generation = str(claim["run"]), int(claim["generation"])
        written = Store(store.client, of_job.url.below(run)).get_json(LAYOUT.fleet_document) or {}
        if int(written.get("generation") or 0) >= generation:
            return False
        if claim.get("host") == ours["host"] and not _is_another_alive(int(claim["pid"])):
            return True
        return (moment - parse_rfc3339(str(claim["time"]))).total_seconds() > _TURN_SECONDS

    ours = {
        "run": ready.plan.run,
        "generation": ready.plan.generation,
        "time": rfc3339(moment),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "request": secrets.token_hex(8),
    }
    winner = of_job.claim(f"requests/{ready.turn}.json", ours, is_stale)
    if winner != ours:
        raise Conflict(
            f"another request for job {ready.plan.job!r} was made at the same time: it began run {winner['run']}",
            next_step=f"`fleetctl status {ready.plan.job}` shows it",
        )


def _is_another_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


def _record(store: Store, ready: Ready, clock: Clock) -> None:
    """Write the run's documents. The status is reset only if no fleet can have been sent yet: so an earlier fleet's end
    is not read as this fleet's, and a running fleet's progress is not overwritten."""
    store.put_json(LAYOUT.job_document, json.loads(ready.instance.to_json()))
    _write_fleet(store, ready, fleet="", request=None, volume="")
    if ready.fresh or store.read_status() is None:
        _write_status(store, ready, clock)
    if ready.fresh and ready.plan.generation > 1:
        # Launches without a checkpoint count towards parking; those of the earlier fleets no longer do.
        marker = {"time": rfc3339(clock.now()), "acknowledged": True, "outcome": "resumed"}
        store.count_launch(f"resume-{ready.plan.generation}", marker)


def _write_fleet(store: Store, ready: Ready, *, fleet: str, request: dict[str, Any] | None, volume: str) -> None:
    """Write the fleet's document, with today's prices: instances cannot read list prices, which the receipt needs."""
    prices = [vars(price) for price in ready.plan.prices]
    if not prices:  # a continued request reads no prices
        prices = (store.get_json(LAYOUT.fleet_document) or {}).get("prices", [])
    store.put_json(LAYOUT.fleet_document, {
        "prices": prices,
        "schema_version": 1, "fleet_id": fleet or None, "engine": ready.instance.job.fleet.engine,
        "requested_at": ready.plan.requested_at, "generation": ready.plan.generation, "previous": list(ready.previous),
        "volume_id": volume or None, "request": request,
    })  # fmt: skip


def _upload_wheels(store: Store, ready: Ready) -> None:
    """Upload the wheels first, the manifest last: a manifest in the store means that all its wheels are there."""
    present = dict(store.sizes(LAYOUT.wheels))
    for wheel in ready.wheelhouse.wheels:
        key = f"{LAYOUT.wheels}{wheel.name}"
        if present.get(key) != wheel.size or wheel.name.startswith("spotheal-"):
            store.put_file(key, ready.wheelhouse.folder / wheel.name)
    store.put_bytes(LAYOUT.manifest, ready.wheelhouse.manifest, "application/json")


def _upload_bundle(store: Store, ready: Ready) -> None:
    with tempfile.TemporaryDirectory(prefix="spotheal-") as scratch:
        store.put_file(
            LAYOUT.repository_bundle, repository.write_bundle(ready.source, Path(scratch) / "repository.bundle")
        )


def _create_volume(session: Session, spec: Any) -> str:
    try:
        return session.ec2.create_volume(spec).id
    except TokenUsed as error:
        raise Conflict(
            f"the run's volume was made before and is gone or different: {error.message}",
            next_step="--new-run begins another run with a new volume",
        ) from error


def _create_template(session: Session, arguments: dict[str, Any]) -> None:
    """Create the template. Its name has run and generation, so an existing one is ours, of an interrupted attempt.

    Its contents may be older than job.toml; AWS has no call to replace a version, so it is deleted and created again.
    """
    ec2 = session.client("ec2")
    name = arguments["LaunchTemplateName"]
    try:
        with translated(f"create launch template {name}"):
            ec2.create_launch_template(**arguments)
        return
    except SpothealError as error:
        if error.code not in ("InvalidLaunchTemplateName.AlreadyExistsException", "IdempotentParameterMismatch"):
            raise
    with translated(f"replace launch template {name}"):
        ec2.delete_launch_template(LaunchTemplateName=name)
        fresh = {key: value for key, value in arguments.items() if key != "ClientToken"}
        ec2.create_launch_template(**fresh)


def _send(
    session: Session, store: Store, ready: Ready, arguments: dict[str, Any], volume: str, clock: Clock, until: float
) -> str:
    _write_fleet(store, ready, fleet="", request=arguments, volume=volume)
    try:
        fleet = _request_fleet(session, arguments, clock, until)
    except SpothealError as error:
        if not isinstance(error, Retryable):  # AWS refused: no fleet will follow, and a corrected request may be sent
            _write_fleet(store, ready, fleet="", request=None, volume=volume)
        raise
    job = ready.instance.job
    if seconds(job.fleet.on_demand_after):  # before the fleet is recorded: interrupted here, the same request arms it
        schedule = rescue.schedule(job, ready.plan.run, fleet, _rescue_scope(session, ready), clock)
        rescue.arm(session.client("scheduler"), schedule, clock)
    _write_fleet(store, ready, fleet=fleet, request=arguments, volume=volume)
    return fleet


def _request_fleet(session: Session, arguments: dict[str, Any], clock: Clock, until: float) -> str:
    """A new template or role may not be known everywhere yet: the call is repeated until `until` (monotonic)."""

    def is_young(error: SpothealError) -> bool:
        return error.code.startswith("InvalidLaunchTemplate") or any(sign in error.message for sign in _YOUNG_ROLE)

    client = session.client("ec2")
    return until_it_works(
        lambda: engine.send(client, arguments), clock, pause=_TRY_SECONDS, passes=is_young,
        seconds_max=until - clock.monotonic(),
    )  # fmt: skip


def _write_status(store: Store, ready: Ready, clock: Clock) -> None:
    stored = store.read_status() or {}
    store.write_status({
        "schema_version": STATUS_SCHEMA_VERSION, "job": ready.plan.job, "run": ready.plan.run,
        "phase": Phase.REQUESTED.value, "reason": "", "heartbeat": rfc3339(clock.now()), "term": None, "fleet": None,
        "instance": None, "instance_type": None, "zone": None, "attempt": None, "launches": None, "volume": None,
        "revision": ready.plan.commit, "progress": stored.get("progress"), "notice": None,
    })  # fmt: skip
