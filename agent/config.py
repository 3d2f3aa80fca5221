"""job.toml, every key of it, and the document that an instance gets: parsed once, frozen, all faults reported together.

`KEYS` is the one table: the parser, the defaults, `fleetctl init` and the table in docs/job-toml.md are made from it.
On the instance the same content is JSON, with what `request` decided beside it (`InstanceConfig`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spotheal.agent.errors import ConfigError
from spotheal.agent.names import JOB_NAME, EfsUrl, StoreUrl, parse_results
from spotheal.agent.secret_reference import SecretReference

INSTANCE_SCHEMA_VERSION = 1
ENTRIES_MAX = 10_000  # of a sweep
REQUIRED: Any = object()
MACHINES_MAX = 64  # of a run: each is an EC2 describe and an S3 object in every look at the others
POLICY_CHARACTERS_MAX = 2048
_DURATION = re.compile(r"(\d+)\s*(s|m|h|d)")
_DURATION_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(duration: str) -> int:
    """`"90s"`, `"20m"`, `"3h"`, `"2d"` as seconds; ValueError where it is none of these."""
    match = _DURATION.fullmatch(duration.strip())
    if not match:
        raise ValueError("is not a duration such as 90s, 20m, 3h or 2d")
    return int(match.group(1)) * _DURATION_SECONDS[match.group(2)]


# ------------------------------------------------------------------------------------------- checks of a single value
Check = Callable[[Any], str]  # "" where the value is good, else what is wrong with it ("must be …")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        return "must be a string"
    return "must not hold control characters" if any(ord(c) < 32 or ord(c) == 127 for c in value) else ""


_HOST_KEY = re.compile(r"[^\s@#-]\S* (?:ssh|ecdsa|sk)-[\w@.-]+ [A-Za-z0-9+/=]+(?: [^\n]*)?")


def _matching(pattern: str, legal: str) -> Check:
    return lambda value: _text(value) or ("" if re.fullmatch(pattern, value) else f"must be {legal}")


def _one_of(*values: str) -> Check:
    return lambda value: (
        ""
        if value in values and isinstance(value, str)
        else "must be one of " + ", ".join(f'"{legal}"' for legal in values)
    )


def _boolean(value: Any) -> str:
    return "" if isinstance(value, bool) else "must be true or false"


def _integer(low: int, high: int) -> Check:
    def check(value: Any) -> str:
        good = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        return "" if good else f"must be a whole number from {low} to {high}"

    return check


def _amount(value: Any) -> str:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e9
    return "" if good else "must be a number, 0 or more"


def _duration(value: Any) -> str:
    if _text(value):
        return _text(value)
    try:
        seconds(value)
    except ValueError as fault:
        return str(fault)
    return ""


def _argv(value: Any) -> str:
    good = isinstance(value, list) and all(isinstance(word, str) and "\0" not in word for word in value)
    return "" if good else 'must be a list of strings, such as ["python", "train.py"] (no shell reads it)'


def _argvs(value: Any) -> str:
    good = isinstance(value, list) and all(word and not _argv(word) for word in value)
    return "" if good else 'must be a list of commands, each a list of strings, such as [["make", "data"]]'


def _inside(value: Any) -> str:
    """A path below the clone that cannot leave it."""
    if _text(value):
        return _text(value)
    return "must be a path inside the repository" if value.startswith("/") or ".." in value.split("/") else ""


def _insides(value: Any) -> str:
    good = isinstance(value, list) and all(word and word != "." and not _inside(word) for word in value)
    return "" if good else "must be a list of paths inside the repository"


def _mount(value: Any) -> str:
    safe = _matching(r"/[A-Za-z0-9._/-]+", "an absolute path of letters, digits and . _ - /")(value)
    return safe or ("must not hold .." if ".." in value.split("/") else "")


def _store(value: Any) -> str:
    if _text(value) or not value:
        return _text(value)
    try:
        StoreUrl.parse(value)
    except ValueError as fault:
        return str(fault)
    return ""


def _results(value: Any) -> str:
    if _text(value) or not value:
        return _text(value)
    try:
        parse_results(value)
    except ValueError as fault:
        return str(fault)
    return ""


def _machines(value: Any) -> str:
    match = re.fullmatch(r"(\d{1,3})(?::(\d{1,3}))?", value) if isinstance(value, str) else None
    least, most = machines(value) if match else (0, 0)
    return "" if 1 <= least <= most <= MACHINES_MAX else f'must be "1" to "{MACHINES_MAX}", or a range such as "2:4"'


def machines(nodes: str) -> tuple[int, int]:
    """The least and the most of `nodes`, "2" or "2:4"."""
    least, _, most = nodes.partition(":")
    return int(least), int(most or least)


def _memory(value: Any) -> str:
    return _amount(value) or ("" if 0.25 <= value <= 4096 else "must be from 0.25 to 4096")


def _types(value: Any) -> str:
    good = isinstance(value, list) and all(
        isinstance(one, str) and re.fullmatch(r"[a-z][a-z0-9-]*(\.[a-z0-9-]+)?", one) for one in value
    )
    return "" if good else 'must be a list of instance types or families, such as ["g5", "g6.xlarge"]'


def _gpus(value: Any) -> str:
    return "" if value == "gpu" else _integer(1, 64)(value) and 'must be a whole number from 1 to 64, or "gpu"'


def _reference(value: Any) -> str:
    if _text(value) or not value:
        return _text(value)
    try:
        SecretReference.parse(value)
    except ValueError as fault:
        return str(fault)
    return ""


def _host_keys(value: Any) -> str:
    if not isinstance(value, str):
        return _text(value)
    lines = [line.strip() for line in value.split("\n") if line.strip()]
    is_good = all(_text(line) == "" and _HOST_KEY.fullmatch(line) for line in lines)
    return "" if is_good else "must be lines of known_hosts: HOST TYPE KEY"


def _policy(value: Any) -> str:
    """A file's name in job.toml; on an instance the document itself."""
    if _text(value) or not value.startswith("{"):
        return _text(value)
    return policy_fault(value)


def policy_fault(text: str) -> str:
    """What is wrong with a session policy, "" where nothing is. AWS takes 2,048 characters of one."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return "is no JSON"
    if not isinstance(document, dict) or not isinstance(document.get("Statement"), list | dict):
        return "is no IAM policy: a JSON object with Version and Statement"
    return "" if len(text) <= POLICY_CHARACTERS_MAX else f"is longer than {POLICY_CHARACTERS_MAX} characters"


@dataclass(frozen=True)
class Key:
    """One key of job.toml. Where `ready` is False only the default is accepted: better refused than ignored."""

    table: str
    name: str
    default: Any
    check: Check
    says: str
    ready: bool = True


KEYS: tuple[Key, ...] = (
    Key("job", "name", REQUIRED, _matching(JOB_NAME.pattern, "1 to 40 of a-z, 0-9 and -"), "the job's name"),
    Key(
        "job",
        "repository",
        REQUIRED,
        _text,
        'https or ssh URL; "." carries this checkout\'s commit as a git bundle in the store; in a rehearsal any path',
    ),
    Key(
        "job",
        "revision",
        "",
        _matching(r"[A-Za-z0-9._/@{}^~+-]*", "a branch, tag or commit"),
        "branch, tag or commit; `request` pins it to a commit",
    ),
    Key("job", "command", REQUIRED, _argv, "the trainer, a list without a shell; ${SPOTHEAL_…} is expanded"),
    Key("job", "resume_command", [], _argv, "from the second start on; default: command"),
    Key(
        "job",
        "setup",
        [],
        _argvs,
        "commands run first, once per revision, setup and interpreter, in an environment of their own on the volume",
    ),
    Key(
        "job",
        "repository_secret",
        "",
        _reference,
        "where a token (https) or a private key (ssh) for the repository lies: ssm:/path or secretsmanager:id",
    ),
    Key("job", "known_hosts", "", _host_keys,
        "keys of an ssh repository's host, lines of known_hosts; default: those that this machine knows"),
    Key("job", "directory", "", _inside, "folder of the clone in which everything runs"),
    Key(
        "job",
        "region",
        "",
        _matching(r"[a-z]{2}(-[a-z]+)+-\d|", "a region such as us-west-2"),
        "written by init, so that tomorrow's shell finds the job",
    ),
    Key("job", "python", "", _text, "what `python` means; default: the machine image's environment with torch"),
    Key("job", "keep", [], _insides, "paths of the clone that live on the volume"),
    Key("job", "submodules", False, _boolean, "check out submodules too"),
    Key(
        "job",
        "set_aside_broken",
        False,
        _boolean,
        "after two restarts without a step, set the newest checkpoint file aside",
    ),
    Key("job", "keep_on_failure", "0m", _duration, "leave a failed instance up for so long, for debugging"),
    Key(
        "job",
        "nproc_per_node",
        1,
        _gpus,
        'ranks a machine, or "gpu" for one a GPU; torchrun is put before a command that does not launch them itself',
    ),
    Key(
        "job",
        "gpus",
        0,
        _integer(0, 64),
        "GPUs a machine must have; an instance type that has fewer is not used for the run; 0 = not looked at",
    ),
    Key("job", "gpu_memory_gib", 0, _amount, "of each of them, as the card is sold; 0 = any"),
    Key("job", "nodes", "1", _machines, 'machines that train together, "2", or at least and at most, "2:4"; needs EFS'),
    Key("job", "nodes_wait", "15m", _duration, "how long fewer machines than the least wait for others; then it parks"),
    Key("volume", "name", "DL-datasets-checkpoints", _text, "Name tag of the volume"),
    Key("volume", "size_gib", 100, _integer(1, 65536), "size in GiB"),
    Key("volume", "type", "gp3", _one_of("gp3", "gp2", "io1", "io2", "st1", "sc1"), "EBS volume type"),
    Key("volume", "mount", "/dltraining", _mount, "mount point; datasets/ checkpoints/ results/ logs/ lie below it"),
    Key("volume", "filesystem", "xfs", _one_of("xfs", "ext4"), "filesystem of a new volume"),
    Key("volume", "snapshot", "", _matching(r"(snap-[0-9a-f]+)?", "a snapshot id"), "start from this one (a dataset)"),
    Key("volume", "initialization_rate", 0, _integer(0, 300), "MiB/s at which a restored volume is filled; 0 = lazily"),
    Key("volume", "snapshot_every", "0m", _duration, "base snapshots, which make the next move small; 0m = none"),
    Key("volume", "delete_superseded", True, _boolean, "false: old volumes and snapshots are left to the operator"),
    Key(
        "fleet",
        "engine",
        "spot-fleet",
        _one_of("spot-fleet", "ec2-fleet"),
        "AWS interface that keeps the capacity; the fleet's file is the same for both",
    ),
    Key("fleet", "harden", True, _boolean, "launch template with IMDSv2 required and a hop limit of 1"),
    Key(
        "fleet",
        "on_demand_after",
        "0m",
        _duration,
        "an on-demand instance after so long without spot; 0m = never; needs `limits.dollars`",
    ),
    Key(
        "fleet",
        "ssh_from",
        "",
        _matching(r"([0-9a-fA-F.:]+(/\d{1,3})?)?", "an address such as 203.0.113.7/32"),
        "from where `request` opens ssh in its security group; default: from nowhere",
    ),
    Key("fleet", "public_key", "", _text, "file with the public key that `request` imports as the fleet's KeyName"),
    Key("limits", "failures", 3, _integer(1, 100), "failures without a step gained between them that end the run"),
    Key(
        "limits",
        "silent",
        "4h",
        _duration,
        "without a step, a line of output or a new checkpoint for so long it hangs, and is started again; 0m = never",
    ),
    Key("limits", "hours", 0, _amount, "hours of the run after which it saves and ends; 0 = none"),
    Key("limits", "dollars", 0, _amount, "dollars since the request after which it saves and ends; 0 = none"),
    Key(
        "cage",
        "mode",
        "on",
        _one_of("on", "imds", "off"),
        '"on": the trainer in a sandbox, without a way to the instance\'s role; "imds": with one; "off": no cage',
    ),
    Key(
        "cage",
        "user",
        "spotheal-trainer",
        _matching(r"[a-z_][a-z0-9_-]{0,31}", "a user name"),
        "the cage's own user, made where it is not there; with the cage off, whom the trainer runs as",
    ),
    Key("cage", "trainer_policy", "", _policy, "policy file of a narrow role for the caged trainer"),
    Key("store", "url", "", _store, "s3://bucket/prefix; default: bucket spotheal-<account>-<region>"),
    Key("store", "results", "", _results, "s3://bucket/prefix or efs://fs-id/folder for results; default: the store"),
    Key("batch", "image", "", _matching(r"[A-Za-z0-9./:@_-]{0,255}", "a container image"),
        "image of containers, with git and spotheal in it; default: the one that `fleetctl batch image push` makes"),
    Key("batch", "vcpus", 4, _integer(1, 192), "vCPUs of a container"),
    Key("batch", "memory_gib", 14.0, _memory, "memory of a container; some of its host's is ECS's own"),
    Key("batch", "gpus", 0, _integer(0, 16), "GPUs of a container; 0: what `[job] gpus` says"),
    Key("batch", "max_vcpus", 64, _integer(1, 100_000), "vCPUs of all containers at once, spot and on demand each"),
    Key("batch", "instance_types", [], _types, "types or families; default: g4dn, g5, g6 for GPUs, else AWS's choice"),
    Key("batch", "on_demand", True, _boolean, "on-demand instances where spot has no capacity"),
    Key("batch", "attempts", 10, _integer(1, 10), "how often a host may go away under a container; 10 is AWS's most"),
    Key("batch", "copy_every", "5m", _duration, "how often changed checkpoints are copied to the store (without EFS)"),
    Key(
        "notify",
        "webhook",
        "",
        _matching(r"(https?://\S+)?", "an http(s) URL"),
        "POSTed JSON with `text` (Slack, Mattermost, Discord's /slack) at ends, interruptions and 80 % of a limit",
    ),
    Key(
        "notify",
        "sns",
        "",
        _matching(r"(arn:aws[a-z-]*:sns:[a-z0-9-]+:\d{12}:[A-Za-z0-9_-]{1,256})?", "the ARN of an SNS topic"),
        "the same as text to this topic",
    ),
)
FREE_TABLES = {
    "environment": 'NAME = "value": environment of the trainer',
    "secrets": 'NAME = "ssm:/path" or "secretsmanager:id": fetched on the instance, never logged',
}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


# --------------------------------------------------------------------------------------------------- the frozen result
@dataclass(frozen=True)
class JobTable:
    name: str
    repository: str
    revision: str
    command: tuple[str, ...]
    resume_command: tuple[str, ...]
    setup: tuple[tuple[str, ...], ...]
    repository_secret: str
    known_hosts: str
    directory: str
    region: str
    python: str
    keep: tuple[str, ...]
    submodules: bool
    set_aside_broken: bool
    keep_on_failure: str
    nproc_per_node: int | str
    gpus: int
    gpu_memory_gib: float
    nodes: str
    nodes_wait: str


@dataclass(frozen=True)
class VolumeTable:
    name: str
    size_gib: int
    type: str
    mount: str
    filesystem: str
    snapshot: str
    initialization_rate: int
    snapshot_every: str
    delete_superseded: bool


@dataclass(frozen=True)
class FleetTable:
    engine: str
    harden: bool
    on_demand_after: str
    ssh_from: str
    public_key: str


@dataclass(frozen=True)
class LimitsTable:
    failures: int
    silent: str
    hours: float
    dollars: float


@dataclass(frozen=True)
class CageTable:
    mode: str
    user: str
    trainer_policy: str


@dataclass(frozen=True)
class StoreTable:
    url: str
    results: str

    @property
    def results_place(self) -> StoreUrl | EfsUrl | None:
        """Where results go, apart from the store."""
        return parse_results(self.results) if self.results else None


@dataclass(frozen=True)
class BatchTable:
    image: str
    vcpus: int
    memory_gib: float
    gpus: int
    max_vcpus: int
    instance_types: tuple[str, ...]
    on_demand: bool
    attempts: int
    copy_every: str


@dataclass(frozen=True)
class NotifyTable:
    webhook: str
    sns: str


@dataclass(frozen=True)
class JobConfig:
    """job.toml. Durations are kept as written; `config.seconds` reads them."""

    job: JobTable
    volume: VolumeTable
    fleet: FleetTable
    limits: LimitsTable
    cage: CageTable
    store: StoreTable
    batch: BatchTable
    notify: NotifyTable
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)

    @property
    def machines(self) -> tuple[int, int]:
        """At least and at most so many train together."""
        return machines(self.job.nodes)

    @property
    def on_machines(self) -> bool:
        """Several machines: EFS in the place of a volume."""
        return self.machines != (1, 1)

    def to_document(self) -> dict[str, Any]:
        """Plain tables, as job.toml has them: `parse_job(config.to_document())` gives `config` again."""
        document: dict[str, Any] = {}
        for key in KEYS:
            value = getattr(getattr(self, key.table), key.name)
            document.setdefault(key.table, {})[key.name] = _plain(value)
        return document | {"environment": dict(self.environment), "secrets": dict(self.secrets)}


_TABLES = {
    "job": JobTable,
    "volume": VolumeTable,
    "fleet": FleetTable,
    "limits": LimitsTable,
    "cage": CageTable,
    "store": StoreTable,
    "batch": BatchTable,
    "notify": NotifyTable,
}


def parse_job(document: Mapping[str, Any], *, source: str = "job.toml") -> JobConfig:
    """The configuration that `document` (tables of job.toml) describes.

    Raises ConfigError, whose message has one line a fault: `source: [table] key: what is wrong`.
    """
    faults: list[str] = []
    values: dict[str, dict[str, Any]] = {table: {} for table in _TABLES}
    for table in document:
        if table not in _TABLES and table not in FREE_TABLES:
            faults.append(f"[{table}] is no table; there are {', '.join([*_TABLES, *FREE_TABLES])}")
    for table in _TABLES:
        given = document.get(table, {})
        if not isinstance(given, Mapping):
            faults.append(f"{table} must be a table, [{table}]")
            continue
        keys = {key.name: key for key in KEYS if key.table == table}
        faults += [f"[{table}] {name}: no such key; there are {', '.join(keys)}" for name in given if name not in keys]
        for key in keys.values():
            value, fault = _value(key, given)
            values[table][key.name] = value
            if fault:
                faults.append(f"[{table}] {key.name}: {fault}")
    for table in FREE_TABLES:
        faults += _free_faults(table, document.get(table, {}))
    if not faults:
        faults += _faults_between(values, document)
    if faults:
        raise ConfigError(
            "\n".join(f"{source}: {fault}" for fault in faults),
            next_step=f"correct {source}; docs/job-toml.md lists every key",
        )
    tables: dict[str, Any] = {
        name: cls(**{key: _frozen(value) for key, value in values[name].items()}) for name, cls in _TABLES.items()
    }
    free: dict[str, Any] = {name: dict(document.get(name, {})) for name in FREE_TABLES}
    return JobConfig(**tables, **free)


def _faults_between(values: Mapping[str, Mapping[str, Any]], document: Mapping[str, Any]) -> list[str]:
    """What is wrong only beside another key."""
    job, cage = values["job"], values["cage"]
    faults = [] if job["command"] else ["[job] command: must name a program"]
    if job["repository_secret"] and not re.match(r"https://|ssh://|[\w.@-]+:(?!//)", job["repository"]):
        faults.append("[job] repository_secret: is for a repository with an https or ssh address")
    if cage["trainer_policy"] and cage["mode"] != "on":
        faults.append('[cage] trainer_policy: needs mode = "on": without the relay the trainer has no role of its own')
    if machines(job["nodes"]) != (1, 1):
        faults += _machines_faults(values)
    both = sorted(set(document.get("environment", {})) & set(document.get("secrets", {})))
    return faults + [f"[secrets] {name}: stands in [environment] too" for name in both]


def _machines_faults(values: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What several machines need, and what goes with one only."""
    results, fleet, nodes = values["store"]["results"], values["fleet"], values["job"]["nodes"]
    faults = []
    if not results.startswith("efs://"):
        faults.append(
            f'[job] nodes: "{nodes}" machines keep their checkpoints on EFS; write results = "efs://fs-…/folder" in'
            " [store] (`fleetctl results create-efs` makes the file system)"
        )
    if fleet["on_demand_after"] != "0m":
        faults.append("[fleet] on_demand_after: is for a job on one machine")
    if values["volume"]["snapshot"]:
        faults.append("[volume] snapshot: several machines have no volume; put the dataset on EFS, or download it")
    return faults


def _value(key: Key, given: Mapping[str, Any]) -> tuple[Any, str]:
    if key.name not in given:
        return (None, "is required") if key.default is REQUIRED else (key.default, "")
    value = given[key.name]
    fault = key.check(value)
    if not fault and not key.ready and value != key.default:
        fault = f"is not supported by this version; leave it out (default {json.dumps(key.default)})"
    return value, fault


def _free_faults(table: str, given: Any) -> list[str]:
    if not isinstance(given, Mapping):
        return [f"{table} must be a table, [{table}]"]
    faults = []
    for name, value in given.items():
        if not _VARIABLE.fullmatch(name):
            faults.append(f"[{table}] {name!r}: is no name of an environment variable")
        elif name.startswith("SPOTHEAL_"):
            faults.append(f"[{table}] {name}: names that begin with SPOTHEAL_ are the agent's")
        elif not isinstance(value, str) or "\0" in value:
            faults.append(f"[{table}] {name}: must be a string")
        elif table == "secrets" and (fault := _reference(value) or ("" if value else "must not be empty")):
            faults.append(f"[secrets] {name}: {fault}")
    return faults


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


# --------------------------------------------------------------------------------------------- what an instance is told
_RUN_PATTERNS = {
    "id": r"[0-9A-Za-z]{1,40}",
    "region": r"[a-z]{2}(-[a-z]+)+-\d",
    "store": r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/[A-Za-z0-9!_.*'()/-]+",
    "revision": r"[0-9a-f]{40}([0-9a-f]{24})?",
    "requested_at": r"[0-9TZ:+.-]*",
}


@dataclass(frozen=True)
class InstanceConfig:
    """The document in the user data: the job, and what `request` decided.

    `store` is the run's prefix, `s3://bucket/prefix/<job>/<run>`. `revision` is a full commit id. `store` and `region`
    are all that an instance needs to find everything else.
    """

    job: JobConfig
    run: str
    region: str
    store: StoreUrl
    revision: str
    requested_at: str = ""  # RFC 3339; limits.hours counts from here
    entries: int = 0  # of a sweep: how many runs it has; every instance then works on one after the other
    index: int | None = None  # of one run of a sweep, which has a run id and a store of its own
    sources: StoreUrl | None = None  # where a run of a sweep finds the code: the sweep's store

    def to_json(self) -> str:
        run = {
            "id": self.run,
            "region": self.region,
            "store": str(self.store),
            "revision": self.revision,
            "requested_at": self.requested_at,
            **({"entries": self.entries} if self.entries else {}),
        }
        document = {"schema_version": INSTANCE_SCHEMA_VERSION, "run": run, **self.job.to_document()}
        return json.dumps(document, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, *, source: str = "the agent's configuration") -> InstanceConfig:
        """Raises ConfigError that lists all faults."""
        try:
            document = json.loads(text)
        except ValueError as fault:
            raise ConfigError(
                f"{source} is not JSON: {fault}", next_step="render it again with `fleetctl request`"
            ) from None
        if not isinstance(document, dict):
            raise ConfigError(f"{source} must be a JSON object", next_step="render it again with `fleetctl request`")
        version = document.pop("schema_version", None)
        faults = [] if version == INSTANCE_SCHEMA_VERSION else [f"schema_version: must be {INSTANCE_SCHEMA_VERSION}"]
        run = document.pop("run", None)
        own: dict[str, str] = {}
        for name, pattern in _RUN_PATTERNS.items():
            value = run.get(name, "" if name == "requested_at" else None) if isinstance(run, dict) else None
            if not isinstance(value, str) or not re.fullmatch(pattern, value):
                faults.append(f"[run] {name}: is missing or not of the form {pattern}")
            own[name] = str(value)
        entries = run.get("entries", 0) if isinstance(run, dict) else 0
        if _integer(0, ENTRIES_MAX)(entries):
            faults.append(f"[run] entries: {_integer(0, ENTRIES_MAX)(entries)}")
        job = None
        try:
            job = parse_job(document, source=source)
        except ConfigError as fault:
            faults.append(fault.message)
        if faults or job is None:
            raise ConfigError(
                "\n".join(f if f.startswith(source) else f"{source}: {f}" for f in faults),
                next_step="render it again with `fleetctl request`",
            )
        return cls(
            job=job,
            run=own["id"],
            region=own["region"],
            store=StoreUrl.parse(own["store"]),
            revision=own["revision"],
            requested_at=own["requested_at"],
            entries=entries,
        )
