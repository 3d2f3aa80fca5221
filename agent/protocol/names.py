"""The names both sides agree on: tags, states, the layout of the store, the status document. Standard library only."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum

# ---------------------------------------------------------------------------------------------------------------- tags
TAG_JOB = "spotheal:job"
TAG_RUN = "spotheal:run"
TAG_STORE = "spotheal:store"  # of fleets and instances: where all jobs of whoever requested them are
TAG_TERM = "spotheal:term"
TAG_STATE = "spotheal:state"
TAG_PURPOSE = "spotheal:purpose"
FILLING = "prepare"  # the purpose of an instance that fills a volume
TAG_FLEET = "spotheal:fleet"
TAG_REASON = "spotheal:reason"
TAG_SAVED_STEP = "spotheal:saved-step"
TAG_NAME = "Name"
TAG_FLEET_REQUEST = "aws:ec2spot:fleet-request-id"  # put on instances by Spot Fleet
TAG_EC2_FLEET = "aws:ec2:fleet-id"  # put on instances by EC2 Fleet


class VolumeState(str, Enum):
    """`spotheal:state` of a volume."""

    NEW = "new"  # made by `request`, never written by a trainer; the only state that may be formatted
    MOVING = "moving"  # half made in another zone; superseded, never promoted, by a later term
    CURRENT = "current"  # the job's volume (the highest term wins)
    SUPERSEDED = "superseded"  # a verified successor exists
    DONE = "done"  # the run has ended


class Purpose(str, Enum):
    """`spotheal:purpose` of a snapshot."""

    HANDOVER = "handover"  # left by a writer that unmounted first: complete, may be adopted
    BASE = "base"  # taken of a mounted volume: only makes the next snapshot small


# --------------------------------------------------------------------------------------------------------------- names
JOB_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def new_run_id(moment: datetime) -> str:
    """A ULID: 26 characters that sort by time (48 bits of milliseconds, 80 random bits)."""
    value = (int(moment.timestamp() * 1000) << 80) | secrets.randbits(80)
    return "".join(_CROCKFORD[(value >> shift) & 31] for shift in range(125, -1, -5))


def default_bucket(account: str, region: str) -> str:
    return f"spotheal-{account}-{region}"


def default_volume(job: str) -> str:
    """The Name tag of a job's volume if job.toml gives none. Each job has its own: a shared one let a request take data
    that was uploaded for another job (finding operator.md 7)."""
    return f"spotheal-{job}"


def volume_token(run: str, term: int, zone: str, snapshot: str, attempt: int) -> str:
    """ClientToken of CreateVolume: 60 hex digits, so that a retry of the same decision cannot make a second volume."""
    return hashlib.sha256("\0".join((run, str(term), zone, snapshot, str(attempt))).encode()).hexdigest()[:60]


def rescue_schedule(job: str, run: str) -> str:
    """EventBridge Scheduler's schedule of the run's on-demand rescue. The job is in it, so that a policy can say whose
    it is, as 12 hex digits: 64 characters are all there is. "" for any job's, as IAM writes it."""
    mark = hashlib.sha256(job.encode()).hexdigest()[:12] if job else "*"
    return f"spotheal-{mark}-{run}"


def schedule_expression(at: datetime) -> str:
    """A one-time schedule of EventBridge Scheduler, to the second; its time zone is UTC where none is named."""
    return at.astimezone(timezone.utc).strftime("at(%Y-%m-%dT%H:%M:%S)")


# ------------------------------------------------------------------------------------------------- layout of the store
@dataclass(frozen=True)
class StoreLayout:
    """Keys below `s3://bucket/prefix/<job>/<run>/`, relative to that prefix."""

    job_document = "job.json"  # what `request` decided: the instance's configuration, the fleet's id beside it
    fleet_document = "fleet.json"  # {"fleet_id", "engine", "requested_at", "request": {...}}
    manifest = "agent/manifest.json"  # {"files": [{"name", "sha256", "size"}]}: the wheelhouse
    wheels = "agent/wheels/"
    repository_bundle = "agent/repository.bundle"  # where repository = "."
    status = "status.json"
    ledger = "ledger.jsonl"
    logs = "logs/"  # logs/<instance>/agent.0000.jsonl, logs/<instance>/trainer.0000.log
    results = "results/"
    metrics = "metrics.jsonl"  # the trainer's metrics file, thinned where it is large
    live_metrics = "metrics.jsonl"  # the same among the results, where the trainer put no file of that name there
    results_listing = "results.json"  # {"place", "files": [{"name", "size", "sha256"}]} of results that lie elsewhere
    launches = "launches/"  # launches/<instance>.json, put before anything can fail
    terms = "terms/"
    nodes = "nodes/"  # of a run on several machines at once
    end_claim = "rendezvous/end.json"  # which of them records the end
    copy_claim = "rendezvous/copy-claim.json"  # which of them makes what all share: {"instance", "held"}
    working_copy = "rendezvous/working-copy.json"  # of which commit the complete one is, and which folder
    checkpoints = "checkpoints/"  # copies of a run without a volume (on AWS Batch): <term>-<number>.json and blobs/

    # of a sweep, whose runs have prefixes of their own below its own
    sweep = "sweep.json"  # {"entries": [parameters, …], "source"}
    queue = "queue/"
    first_volume = "volume.json"  # of one run of a sweep: where its volume is made, and its id

    @staticmethod
    def queue_claim(entry: int, number: int) -> str:
        """`queue/<entry>.<n>`: an instance works on the entry, the n-th that does; put with `If-None-Match: *`."""
        return f"queue/{entry:05d}.{number:04d}"

    @staticmethod
    def queue_back(entry: int, number: int) -> str:
        """The n-th claim of the entry is given up: by its instance after a handover, or by an operator."""
        return f"queue/{entry:05d}.{number:04d}.back"

    @staticmethod
    def queue_ended(entry: int, done: bool) -> str:
        return f"queue/{entry:05d}.{'done' if done else 'failed'}"

    @staticmethod
    def entry(index: int) -> str:
        """Prefix of one run of a sweep: everything else of this layout is below it."""
        return f"entries/{index:05d}"

    @staticmethod
    def term(number: int) -> str:
        """`terms/<n>`: a claim, put with `If-None-Match: *`."""
        return f"terms/{number}"

    @staticmethod
    def holds(number: int, volume: str) -> str:
        """`terms/<n>.holds.<volume>`, empty: term `n` writes to `volume`. Put when it is mounted and verified, before
        the trainer starts; what the describes say of a volume's tags may be minutes old, this is not."""
        return f"terms/{number}.holds.{volume}"

    @staticmethod
    def formatting(number: int, volume: str) -> str:
        """`terms/<n>.formatting.<volume>`: term `n` makes the volume's first filesystem. Put before mkfs: a volume that
        no term holds and whose mkfs was cut short cannot be mounted, but it can be formatted again."""
        return f"terms/{number}.formatting.{volume}"

    @staticmethod
    def released(number: int) -> str:
        """`terms/<n>.released`, empty: term `n` will not mount or write again. Put before its handover snapshot."""
        return f"terms/{number}.released"

    @staticmethod
    def stop(number: int) -> str:
        """`terms/<n>.stop`, put by an operator: term `n` is to save and to end the run; `{"reason", "seconds"}`. Beside
        the claims, so that the holder sees it with the list that each of its publications begins with."""
        return f"terms/{number}.stop"

    @staticmethod
    def barred(instance_type: str) -> str:
        """What a machine of this type lacked: no other of it is used for the run."""
        return f"barred/{instance_type}.json"

    @staticmethod
    def node(instance: str) -> str:
        """What a machine of a run on several says of itself; its heartbeat too."""
        return f"nodes/{instance}.json"

    @staticmethod
    def rendezvous(term: int) -> str:
        """Where the holder of the term serves the store of torchrun's rendezvous: {"instance", "address", "port"}."""
        return f"rendezvous/{term}.json"

    @staticmethod
    def launch(instance: str) -> str:
        return f"launches/{instance}.json"

    @staticmethod
    def story(instance: str) -> str:
        """What healing saw and did: each look as Python writes it, to be decided again."""
        return f"stories/{instance}.json"

    @staticmethod
    def told(mark: str, channel: str) -> str:
        """A message that a webhook or a topic has taken."""
        return f"told/{mark}.{channel}"

    @staticmethod
    def progress(instance: str) -> str:
        """JSON lines: how far the trainer was, and when."""
        return f"progress/{instance}.jsonl"

    @staticmethod
    def agent_log(instance: str, segment: int = 0) -> str:
        """JSON lines of the agent; a long log is cut in segments."""
        return f"logs/{instance}/agent.{segment:04d}.jsonl"

    @staticmethod
    def trainer_log(instance: str, segment: int = 0) -> str:
        """The trainer's output as it wrote it."""
        return f"logs/{instance}/trainer.{segment:04d}.log"


LAYOUT = StoreLayout()


@dataclass(frozen=True)
class StoreUrl:
    """`s3://bucket/prefix` taken apart; `prefix` has no slash at either end and may be empty."""

    bucket: str
    prefix: str

    @classmethod
    def parse(cls, url: str) -> StoreUrl:
        """ValueError where `url` is not `s3://bucket[/prefix]`."""
        match = re.fullmatch(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/([A-Za-z0-9!_.*'()/-]*))?", url)
        if not match:
            raise ValueError(f"{url!r} is not of the form s3://bucket/prefix")
        return cls(match.group(1), (match.group(2) or "").strip("/"))

    def below(self, *parts: str) -> StoreUrl:
        return StoreUrl(self.bucket, "/".join(part for part in (self.prefix, *parts) if part))

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}" if self.prefix else f"s3://{self.bucket}"


@dataclass(frozen=True)
class EfsUrl:
    """`efs://fs-0123456789abcdef0/folder` taken apart; `folder` has no slash at either end and may be empty."""

    file_system: str
    folder: str = ""

    @classmethod
    def parse(cls, url: str) -> EfsUrl:
        """ValueError where `url` is not `efs://fs-…[/folder]`."""
        match = re.fullmatch(r"efs://(fs-[0-9a-f]{8,40})(?:/([A-Za-z0-9._/-]*))?", url)
        parts = (match.group(2) or "").split("/") if match else [".."]
        if not match or {".", ".."} & set(parts):
            raise ValueError(f"{url!r} is not of the form efs://fs-0123456789abcdef0/folder")
        return cls(match.group(1), "/".join(part for part in parts if part))

    def __str__(self) -> str:
        return f"efs://{self.file_system}/{self.folder}".rstrip("/")


def parse_results(url: str) -> StoreUrl | EfsUrl:
    """What `store.results` names; ValueError where it is neither of the two."""
    if url.startswith("efs://"):
        return EfsUrl.parse(url)
    if url.startswith("s3://"):
        return StoreUrl.parse(url)
    raise ValueError(f"{url!r} is neither s3://bucket/prefix nor efs://fs-0123456789abcdef0/folder")


TRAINER_ROLE = "spotheal-trainer-"  # and the job's name: what its caged trainer acts as (`cage.trainer_policy`)


REGION = r"[a-z]{2,4}(?:-[a-z]+)+-\d+"  # four letters: eusc-de-east-1, of the European Sovereign Cloud
_PARTITIONS = {"cn-": ("aws-cn", "amazonaws.com.cn"), "us-gov-": ("aws-us-gov", "amazonaws.com"),
               "eusc-": ("aws-eusc", "amazonaws.eu")}  # fmt: skip


def partition_of(region: str) -> str:
    """The first word of a region's ARNs after `arn:`."""
    return _partition(region)[0]


def dns_suffix(region: str) -> str:
    """How the host names of AWS's services in this region end."""
    return _partition(region)[1]


def _partition(region: str) -> tuple[str, str]:
    partitions = (partition for start, partition in _PARTITIONS.items() if region.startswith(start))
    return next(partitions, ("aws", "amazonaws.com"))


# --------------------------------------------------------------------------------------------------------------- ends
class Phase(str, Enum):
    """`phase` of status.json: where the run is. The last six are ends and cancel the fleet."""

    REQUESTED = "requested"
    BOOTING = "booting"
    HEALING = "healing"
    TRAINING = "training"
    INTERRUPTED = "interrupted"  # handed over; the fleet replaces the instance
    DONE = "done"
    FAILED = "failed"
    SETUP_FAILED = "set-up failed"
    LIMIT = "limit"
    PARKED = "parked"
    CANCELLED = "cancelled"  # by an operator, who asked for a last checkpoint

    @property
    def is_end(self) -> bool:
        return self in (
            Phase.DONE, Phase.FAILED, Phase.SETUP_FAILED, Phase.LIMIT, Phase.PARKED, Phase.CANCELLED,
        )  # fmt: skip


STATUS_SCHEMA_VERSION = 1
HEARTBEAT_SECONDS = 60.0
SILENT_SECONDS = 600.0  # no heartbeat for so long, and none while we watch for SILENT_CONFIRM_SECONDS: fenced
# Signs of life come a minute apart, and what each takes on the way: where two wall clocks differ by more than ten
# minutes a living holder seems silent between any two of them.
SILENT_CONFIRM_SECONDS = 3 * HEARTBEAT_SECONDS
SNAPSHOTS_KEPT = 2

# status.json, every key (absent figures are null; times RFC 3339 UTC):
#   schema_version, job, run, phase, reason, ended (when; of an end alone), heartbeat, term, fleet,
#   instance, instance_type, zone, attempt (of the trainer on this run), launches,
#   volume, revision,
#   progress: {step, steps_total, epoch, loss, samples_per_second, metrics: {...}, saved: {step, path, time}} or null,
#   notice: {kind, action, deadline} or null, space: {percent, grown: [{folder, bytes}]} of a volume that is nearly full
