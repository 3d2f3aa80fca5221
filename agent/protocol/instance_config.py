"""The document that an instance gets in its user data: the job, and what `request` decided, as JSON."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from spotheal.agent.protocol import bounded_json
from spotheal.agent.protocol.errors import ConfigError
from spotheal.agent.protocol.job import JobConfig, parse_job
from spotheal.agent.protocol.job_values import integer
from spotheal.agent.protocol.names import REGION, StoreUrl

INSTANCE_SCHEMA_VERSION = 1
ENTRIES_MAX = 10_000  # of a sweep
_RUN_PATTERNS = {
    "id": r"[0-9A-Za-z]{1,40}",
    "region": REGION,
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
            document = bounded_json.parse(text)
        except ValueError as fault:
            raise ConfigError(
                f"{source} is not JSON: {fault}", next_step="render it again with `fleetctl request`"
            ) from None
        if not isinstance(document, dict):
            raise ConfigError(f"{source} must be a JSON object", next_step="render it again with `fleetctl request`")
        version = document.pop("schema_version", None)
        faults = [] if version == INSTANCE_SCHEMA_VERSION else [f"schema_version: must be {INSTANCE_SCHEMA_VERSION}"]
        run = document.pop("run", None)
        overrides: dict[str, str] = {}
        for name, pattern in _RUN_PATTERNS.items():
            value = run.get(name, "" if name == "requested_at" else None) if isinstance(run, dict) else None
            if not isinstance(value, str) or not re.fullmatch(pattern, value):
                faults.append(f"[run] {name}: is missing or not of the form {pattern}")
            overrides[name] = str(value)
        entries = run.get("entries", 0) if isinstance(run, dict) else 0
        if integer(0, ENTRIES_MAX)(entries):
            faults.append(f"[run] entries: {integer(0, ENTRIES_MAX)(entries)}")
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
            run=overrides["id"],
            region=overrides["region"],
            store=StoreUrl.parse(overrides["store"]),
            revision=overrides["revision"],
            requested_at=overrides["requested_at"],
            entries=entries,
        )
