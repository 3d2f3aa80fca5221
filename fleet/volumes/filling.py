"""A volume filled on a short-lived instance: launched, followed to its end, and picked up again after a Ctrl-C.

The instance runs userdata/prepare.py. It needs no credentials for that: status and output go to signed addresses below
`<store>/prepare/<volume>/<id>/`. Its role is there for the command (`aws s3 cp …`) alone.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from spotheal import userdata
from spotheal.agent.aws.clients import translated
from spotheal.agent.aws.ec2 import Instance, Volume
from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import Clock
from spotheal.agent.protocol.errors import (
    CapacityError,
    ConfigError,
    JobFailed,
    NoCredentials,
    Retryable,
    WaitTimedOut,
)
from spotheal.agent.protocol.foreign_text import printable
from spotheal.agent.protocol.names import (
    FILLING,
    TAG_JOB,
    TAG_NAME,
    TAG_PURPOSE,
    TAG_REASON,
    TAG_STATE,
    StoreUrl,
    VolumeState,
    new_run_id,
)
from spotheal.agent.protocol.retrying import until_it_works
from spotheal.fleet.request.template import METADATA_OPTIONS
from spotheal.fleet.request.userdata import LIMIT_BYTES
from spotheal.fleet.run.store_documents import sensible

if TYPE_CHECKING:
    from spotheal.agent.protocol.job import JobConfig
    from spotheal.fleet.run.session import Session

_MKFS = "mkfs.json"  # of a volume: whether its first mkfs has begun, or has ended
_LOOK_SECONDS = 2.0
_RUNNING_SECONDS_MAX = 600.0
_FREE_SECONDS_MAX = 300.0
_SILENT_SECONDS_MAX = 900.0  # without a word of a running instance
_TRIES = 6
_AROUND_SECONDS = 600.0  # the boot before the command, and the last words after it
_WORK_SECONDS_MIN = 300.0
Say = Callable[[str], None]
Put = Callable[[bytes], None]


@dataclass(frozen=True)
class Filling:
    """The launch of the instance and its work: a command, or the unpacking of an upload (`parts`)."""

    volume: Volume
    job: JobConfig
    image: str
    instance_type: str
    subnet: str
    profile: str = ""  # ARN or ""
    command: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()  # keys of an upload below the bucket, in order
    to: str = ""
    total_bytes: int = 0
    hours_max: float = 12.0
    spot: bool = False

    def says(self) -> list[str]:
        work = f"run {' '.join(self.command)}" if self.command else "unpack the upload"
        market, volume = "spot" if self.spot else "on-demand", self.volume.id or "the new volume"
        return [f"launch an {market} {self.instance_type} in {self.volume.zone}, for {self.hours_max:g} h at most",
                f"{work} with {volume} at {self.job.volume.mount}, then terminate it"]  # fmt: skip


@dataclass(frozen=True)
class Followed:
    """A filling that is under way: its instance, and the store that has its status."""

    instance: str
    volume: str
    prefix: StoreUrl


# ------------------------------------------------------------------------------------------------------------- launch
def limited(session: Session, filling: Filling) -> tuple[Filling, str]:
    """The filling, ended before the credentials that sign its addresses end; and a note for the user, or "".

    NoCredentials if too little time is left.
    """
    seconds_wanted = filling.hours_max * 3600
    seconds = session.signing_seconds(seconds_wanted + _AROUND_SECONDS)
    if seconds is None:
        return filling, (
            "the AWS credentials are temporary and do not say when they end (AWS_CREDENTIAL_EXPIRATION is not set): if "
            "they end before the work does, the instance finishes it unheard")  # fmt: skip
    work = seconds - _AROUND_SECONDS
    if work >= seconds_wanted:
        return filling, ""
    if work < _WORK_SECONDS_MIN:
        message = f"the AWS credentials end in {seconds / 60:.0f} min: too early to fill a volume"
        raise NoCredentials(message, code="ExpiredToken")
    return replace(filling, hours_max=work / 3600), (
        f"the instance is ended after {work / 60:.0f} min, not {filling.hours_max:g} h: the AWS credentials end then; "
        "for longer use an IAM user's keys, or a role with a longer session (duration_seconds in its profile); a "
        "command that goes on where it stopped (`aws s3 sync`) may also be typed again")  # fmt: skip


def under_way(session: Session, volume: str) -> Followed | None:
    """The live instance that fills this volume already, from a fleetctl that was cut short."""
    live = [instance for instance in session.ec2.instances_tagged(TAG_NAME, _name(volume)) if _is_live(instance)]
    fillings = [
        instance for instance in live if instance.tags.get(TAG_PURPOSE) == FILLING and instance.tags.get(TAG_REASON)
    ]
    return Followed(fillings[0].id, volume, StoreUrl.parse(fillings[0].tags[TAG_REASON])) if fillings else None


def launch(session: Session, root: StoreUrl, filling: Filling, clock: Clock) -> Followed:
    """One instance; returns at once. The volume is attached by `follow`."""
    prefix = root.below(FILLING, filling.volume.id, new_run_id(clock.now()))
    data = userdata.render_prepare(json.dumps(_config(session, prefix, filling)))
    if len(data.encode()) > LIMIT_BYTES:
        raise ConfigError("the command is too long for user data", next_step="put it into a script in the bucket")
    job = filling.job.job.name
    tags = {TAG_NAME: _name(filling.volume.id), TAG_JOB: job, TAG_PURPOSE: FILLING, TAG_REASON: str(prefix)}
    arguments: dict[str, Any] = {
        "ImageId": filling.image, "InstanceType": filling.instance_type, "MinCount": 1, "MaxCount": 1,
        "SubnetId": filling.subnet, "UserData": data, "MetadataOptions": METADATA_OPTIONS,
        "InstanceInitiatedShutdownBehavior": "terminate",
        "ClientToken": hashlib.sha256(str(prefix).encode()).hexdigest()[:60],
        "TagSpecifications": [{"ResourceType": "instance",
                               "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}],
    }  # fmt: skip
    if filling.profile:
        arguments["IamInstanceProfile"] = {"Arn": filling.profile}
    if filling.spot:
        arguments["InstanceMarketOptions"] = {"MarketType": "spot"}
    return Followed(_run(session, arguments, clock), filling.volume.id, prefix)


def _addresses(session: Session, prefix: StoreUrl, filling: Filling) -> dict[str, str]:
    """Signed addresses that the machine takes and gives objects by, good as long as its work may last."""
    seconds = int(filling.hours_max * 3600 + _AROUND_SECONDS)
    urls = {name: session.signed_url("PUT", prefix.below(key), seconds)
            for name, key in (("status", "status.json"), ("log", "output.log"))}  # fmt: skip
    if filling.parts:
        signed = [session.signed_url("GET", StoreUrl(prefix.bucket, key), seconds) for key in filling.parts]
        Store(session.client("s3"), prefix).put_json("parts.json", {"urls": signed})
        urls["parts"] = session.signed_url("GET", prefix.below("parts.json"), seconds)
    urls["mkfs"] = session.signed_url("PUT", _of_volume(prefix).below(_MKFS), seconds)
    return urls


def _of_volume(prefix: StoreUrl) -> StoreUrl:
    return StoreUrl(prefix.bucket, prefix.prefix.rpartition("/")[0])


def _config(session: Session, prefix: StoreUrl, filling: Filling) -> dict[str, Any]:
    mkfs = Store(session.client("s3"), _of_volume(prefix)).get_json(_MKFS) or {}
    table = filling.job.volume
    return {
        "volume": filling.volume.id, "mount": table.mount, "filesystem": table.filesystem,
        "format": filling.volume.tags.get(TAG_STATE) == VolumeState.NEW.value and not filling.volume.snapshot,
        "begun": mkfs.get("mkfs") == "begun", "command": list(filling.command), "to": filling.to,
        "total_bytes": filling.total_bytes, "region": session.region, "seconds_max": filling.hours_max * 3600,
        "urls": _addresses(session, prefix, filling),
    }  # fmt: skip


def _run(session: Session, arguments: dict[str, Any], clock: Clock) -> str:
    """RunInstances; a profile made a moment ago may not be known everywhere yet."""

    def launch() -> str:
        with translated(f"launch an {arguments['InstanceType']}"):
            answer = session.client("ec2").run_instances(**arguments)
            return str(answer["Instances"][0]["InstanceId"])

    try:
        return until_it_works(
            launch, clock, tries_max=_TRIES, pause=lambda tries: 2.0 * tries,
            passes=lambda error: "Invalid IAM Instance Profile" in error.message,
        )  # fmt: skip
    except CapacityError as error:
        error.next_step = "another --instance-type, or another zone with --zone"
        raise


def _name(volume: str) -> str:
    return f"spotheal prepare {volume}"


def _is_live(instance: Instance) -> bool:
    return instance.state in ("pending", "running")


# ------------------------------------------------------------------------------------------------------------- follow
def follow(
    session: Session, followed: Followed, clock: Clock, say: Say, put: Put, show: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Attach the volume, show the instance's status, and return the last one when the volume is free again.

    `put` gets the command's output as it comes, `show` each status. JobFailed if the command failed, or its
    instance ended without a word.
    """
    store = Store(session.client("s3"), followed.prefix)
    _attach(session, followed, clock, say)
    offset, last_word = 0, clock.monotonic()
    status: dict[str, Any] = {}
    while True:
        instance = session.ec2.instance(followed.instance)
        news = _typed(store.get_json("status.json") or {})
        if news and news != status:
            # It has a filesystem now. Its first word may be that it waits, so this is not asked of the first alone.
            if news.get("phase") != "waiting" and status.get("phase") in (None, "waiting"):
                session.ec2.tag([followed.volume], {TAG_STATE: VolumeState.CURRENT.value})
            status, last_word = news, clock.monotonic()
            offset = _put_log(store, status, offset, put)
            show(status)
        if status.get("phase") in ("done", "failed"):
            break
        if instance is not None and not _is_live(instance):
            reason = instance.state_reason or instance.state
            raise JobFailed(f"{followed.instance} ended before its work did ({reason})",
                            next_step="the same command begins again; the files on the volume stay")  # fmt: skip
        if clock.monotonic() - last_word > _SILENT_SECONDS_MAX:
            silence = f"{followed.instance} said nothing for {_SILENT_SECONDS_MAX / 60:.0f} min"
            if status and session.signing_seconds(_AROUND_SECONDS) is None:
                raise WaitTimedOut(
                    f"{silence}: it may still work, and the credentials that signed its addresses have ended; it ends "
                    "by itself when its work or its time is over",
                    next_step="`fleetctl volume ls` shows when the volume is free; to end it now: "
                    f"`aws ec2 terminate-instances --instance-ids {followed.instance}`")  # fmt: skip
            session.ec2.terminate(followed.instance)
            raise WaitTimedOut(f"{silence}; it is ended",
                               next_step="choose an --image with Python 3.7 or newer")  # fmt: skip
        clock.sleep(_LOOK_SECONDS)
    if status.get("phase") == "done":
        session.ec2.tag([followed.volume], {TAG_STATE: VolumeState.CURRENT.value})
    _await_free(session, followed, clock, say)
    if status["phase"] == "failed" or status.get("exit_code"):
        reason = status.get("reason") or f"the command ended with exit code {status.get('exit_code')}"
        output = f"its output is in {followed.prefix}/output.log; the volume stays as it is"
        raise JobFailed(f"{followed.volume} was not filled: {reason}", next_step=output)
    return status


def _attach(session: Session, followed: Followed, clock: Clock, say: Say) -> None:
    say(f"waiting for {followed.instance} to run …")
    limit = clock.monotonic() + _RUNNING_SECONDS_MAX
    while clock.monotonic() < limit:
        instance = session.ec2.instance(followed.instance)
        if instance is not None and instance.state == "running":
            try:
                session.ec2.attach(followed.volume, followed.instance, "/dev/sdf")
                return
            except Retryable:
                pass
        elif instance is not None and not _is_live(instance):
            return  # it ended; `follow` shows its last status
        clock.sleep(_LOOK_SECONDS)
    raise WaitTimedOut(f"{followed.instance} did not run within {_RUNNING_SECONDS_MAX / 60:.0f} min",
                       next_step=f"`aws ec2 terminate-instances --instance-ids {followed.instance}`")  # fmt: skip


@sensible
def _typed(status: dict[str, Any]) -> dict[str, Any]:
    """The status with numbers where its readers count, "" if it has no phase; {} if there is none yet."""
    if not status:
        return {}
    names = ("log_start", "log_end", "done_bytes", "total_bytes", "exit_code")
    numbers = {name: int(status[name]) if status.get(name) is not None else None for name in names}
    return {**status, **numbers, "done_bytes": numbers["done_bytes"] or 0, "phase": str(status.get("phase") or "")}


class Output:
    """What the command writes, piece by piece, as a terminal may show it: lines and progress bars, and no steering."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def plain(self, data: bytes) -> str:
        parts = re.split(r"([\r\n])", self._decoder.decode(data))
        return "".join(part if part in ("\r", "\n") else printable(part) for part in parts)


def _put_log(store: Store, status: dict[str, Any], offset: int, put: Put) -> int:
    """The output since the last call, as far as the store still has it."""
    start, end = status["log_start"] or 0, status["log_end"] or 0
    if end <= offset:
        return offset
    text = store.get_bytes("output.log") or b""
    put(text[max(0, offset - start) : end - start])
    return end


def _await_free(session: Session, followed: Followed, clock: Clock, say: Say) -> None:
    say(f"waiting for {followed.volume} to be free …")
    limit = clock.monotonic() + _FREE_SECONDS_MAX
    while clock.monotonic() < limit:
        volume = session.ec2.volume(followed.volume)
        if volume is not None and volume.state == "available":
            return
        clock.sleep(_LOOK_SECONDS)
    session.ec2.terminate(followed.instance)
    raise WaitTimedOut(f"{followed.volume} is still attached to {followed.instance}, which is ended now",
                       next_step="`fleetctl volume ls` shows when it is free")  # fmt: skip
