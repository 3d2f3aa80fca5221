"""job.toml: parsed once, frozen, all faults reported together. Its keys are in `job_keys`, on an instance it is part of
the document of `instance_config`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from spotheal.agent.protocol.errors import ConfigError
from spotheal.agent.protocol.job_keys import FREE_TABLES, KEYS, REQUIRED, Key
from spotheal.agent.protocol.job_values import machines, reference
from spotheal.agent.protocol.names import EfsUrl, StoreUrl, default_volume, parse_results

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


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
    kms_key: str
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
    """job.toml. Durations are kept as written; `job_values.seconds` reads them."""

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


def _near(name: str, names: Iterable[str]) -> str:
    """`did you mean limits?`, or all that there are."""
    candidates = list(names)
    close = get_close_matches(name.lower(), candidates, 1, 0.75)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(candidates)}"


def parse_job(document: Mapping[str, Any], *, source: str = "job.toml") -> JobConfig:
    """The configuration that `document` (tables of job.toml) describes.

    Raises ConfigError, whose message has one line a fault: `source: [table] key: what is wrong`.
    """
    faults: list[str] = []
    values: dict[str, dict[str, Any]] = {table: {} for table in _TABLES}
    for table in document:
        if table not in _TABLES and table not in FREE_TABLES:
            faults.append(f"[{table}] is no table; {_near(table, [*_TABLES, *FREE_TABLES])}")
    for table in _TABLES:
        given = document.get(table, {})
        if not isinstance(given, Mapping):
            faults.append(f"{table} must be a table, [{table}]")
            continue
        keys = {key.name: key for key in KEYS if key.table == table}
        faults += [f"[{table}] {name}: no such key; {_near(name, keys)}" for name in given if name not in keys]
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
    values["volume"]["name"] = values["volume"]["name"] or default_volume(values["job"]["name"])
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
    if cage["trainer_policy"] and cage["mode"] not in ("on", "calls"):
        reason = "without the relay the trainer has no role of its own"
        faults.append(f'[cage] trainer_policy: needs mode = "on" or "calls": {reason}')
    if machines(job["nodes"]) != (1, 1):
        faults += _machines_faults(values)
    names = sorted(set(document.get("environment", {})) & set(document.get("secrets", {})))
    return faults + [f"[secrets] {name}: stands in [environment] too" for name in names]


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


def _value(key: Key, values: Mapping[str, Any]) -> tuple[Any, str]:
    if key.name not in values:
        return (None, "is required") if key.default is REQUIRED else (key.default, "")
    value = values[key.name]
    fault = key.check(value)
    if not fault and not key.ready and value != key.default:
        fault = f"is not supported by this version; leave it out (default {json.dumps(key.default)})"
    return value, fault


def _free_faults(table: str, values: Any) -> list[str]:
    if not isinstance(values, Mapping):
        return [f"{table} must be a table, [{table}]"]
    faults = []
    for name, value in values.items():
        if not _VARIABLE.fullmatch(name):
            faults.append(f"[{table}] {name!r}: is no name of an environment variable")
        elif name.startswith("SPOTHEAL_"):
            faults.append(f"[{table}] {name}: names that begin with SPOTHEAL_ are the agent's")
        elif not isinstance(value, str) or "\0" in value:
            faults.append(f"[{table}] {name}: must be a string")
        elif table == "secrets" and (fault := reference(value) or ("" if value else "must not be empty")):
            faults.append(f"[secrets] {name}: {fault}")
    return faults


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
