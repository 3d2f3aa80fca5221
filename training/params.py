"""The parameters of one run of a sweep: an entry of the list that `fleetctl sweep run` took.

    p = params(known={"lr", "batch_size"}, default={"lr": 0.1})     # below the agent: this run's own entry
    p = params(3, source="s3://bucket/hyperparam_list.yml")         # anywhere: entry 3 of a list

By hand, without the agent: SPOTHEAL_PARAMS names the list (YAML or JSON, on disk or in S3), and SPOTHEAL_INDEX or
AWS_BATCH_JOB_ARRAY_INDEX, or the argument, the entry. A list in YAML needs PyYAML, one in S3 boto3.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from spotheal.agent.protocol.contract import BATCH_INDEX, INDEX, PARAMS_FILE
from spotheal.agent.protocol.errors import ConfigError

LIST = "SPOTHEAL_PARAMS"
_LIST_BYTES_MAX = 4 << 20


class BadParams(ConfigError, ValueError):
    """The list, the entry or its index is not what it must be."""


def index() -> int | None:
    """The position in the sweep, from 0; None outside of one. BadParams if the environment holds no such number."""
    for name in (INDEX, BATCH_INDEX):
        if (text := os.environ.get(name)) is not None:
            return checked_index(text, name)
    return None


def checked_index(value: Any, name: str = "the index") -> int:
    """`value` as a position from 0 on; text is accepted. BadParams with the value if it is none."""
    text = str(value).strip()
    if isinstance(value, (bool, float)) or not (text.isascii() and text.isdigit()):
        raise BadParams(f"{name} must be a whole number from 0 on, and is {value!r}",
                        next_step="entries of a list are counted from 0")  # fmt: skip
    return int(text)


def params(
    index: int | None = None,
    *,
    known: Collection[str] | None = None,
    default: Mapping[str, Any] | None = None,
    source: str | Path | None = None,
) -> dict[str, Any]:
    """This run's parameters: `default` with the entry's values over it.

    `index`: which entry; below the agent the run's own, and no other. `known`: the names that the trainer reads; an
    entry with another is refused, because a misspelt name would train with a default in silence. `source`: a list to
    take the entry from, else that of SPOTHEAL_PARAMS. Outside of a sweep the defaults alone. BadParams says what is
    wrong with list, entry or index.
    """
    position, entry = _entry(None if index is None else checked_index(index), None if source is None else str(source))
    if known is not None and (strange := sorted(set(entry) - set(known))):
        raise BadParams(f"entry {position} has {', '.join(strange)}; the trainer knows {', '.join(sorted(known))}",
                        next_step="correct the list")  # fmt: skip
    return dict(default or {}) | entry


def entry_of(document: Any, index: int, source: str) -> dict[str, Any]:
    """Entry `index` of a list that was read. BadParams if it is no list, has no such entry or no mapping there."""
    if not isinstance(document, list):
        raise BadParams(f"{source} must be a list of mappings", next_step="write one `- {name: value}` an entry")
    if not document:
        raise BadParams(f"{source} has no entry", next_step="write one `- {name: value}` an entry")
    if not 0 <= index < len(document):
        raise BadParams(f"there is no entry {index} in {source}: it has {len(document)}, 0 to {len(document) - 1}",
                        next_step="start as many runs as the list has entries")  # fmt: skip
    entry = document[index]
    if not isinstance(entry, dict) or not all(isinstance(name, str) for name in entry):
        raise BadParams(f"entry {index} of {source} must be a mapping of names to values")
    return entry


def _entry(chosen: int | None, source: str | None) -> tuple[int | None, dict[str, Any]]:
    run_index, file = index(), os.environ.get(PARAMS_FILE, "")
    listed = source or ("" if file else os.environ.get(LIST, ""))
    if listed:
        position = run_index if chosen is None else chosen
        if position is None:
            raise BadParams(f"which entry of {listed}?", next_step=f"--index 0, params(0), or {INDEX}=0")
        return position, entry_of(_read(listed), position, listed)
    if not file:
        if chosen is not None:
            raise BadParams(f"there is no list to take entry {chosen} from",
                            next_step=f"`fleetctl sweep run LIST`, or {LIST}=LIST in the environment")  # fmt: skip
        return run_index, {}
    if chosen is not None and run_index is not None and chosen != run_index:
        raise BadParams(f"this is run {run_index} of the sweep, and entry {chosen} is another run's",
                        next_step="params() without an index is this run's own")  # fmt: skip
    entry = _parsed(_from_disk(file), file)
    if not isinstance(entry, dict):
        raise BadParams(f"{file} must hold one mapping of names to values")
    return run_index if chosen is None else chosen, entry


def _read(source: str) -> Any:
    return _parsed(_from_s3(source) if source.startswith("s3://") else _from_disk(source), source)


def _from_disk(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_LIST_BYTES_MAX + 1)
    except OSError as fault:
        raise BadParams(
            f"the parameters of this run cannot be read from {path}: {fault.strerror or fault}",
            next_step="name the list that `fleetctl sweep run` takes: YAML or JSON, on disk or s3://bucket/key",
        ) from fault


def _from_s3(source: str) -> bytes:
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as fault:
        raise BadParams(f"{source} needs boto3: {fault}", next_step="python -m pip install boto3") from fault
    bucket, _, key = source.removeprefix("s3://").partition("/")
    try:
        return bytes(boto3.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read(_LIST_BYTES_MAX + 1))
    except (BotoCoreError, ClientError, ValueError) as fault:
        raise BadParams(f"{source} cannot be read: {fault}") from fault


def _parsed(raw: bytes, source: str) -> Any:
    """JSON, else YAML: below the agent it is always JSON, and no library is needed."""
    if len(raw) > _LIST_BYTES_MAX:
        raise BadParams(f"{source} has more than {_LIST_BYTES_MAX} bytes")
    try:
        text = raw.decode("utf-8-sig")
        return json.loads(text)
    except UnicodeDecodeError as fault:
        raise BadParams(f"{source} is no UTF-8 text: {fault}") from fault
    except (ValueError, RecursionError) as fault:
        if source.endswith(".json"):
            raise BadParams(f"{source} is not JSON: {fault}") from fault
    try:
        import yaml

        from spotheal.training import yaml_list
    except ImportError as fault:
        raise BadParams(f"{source} is not JSON, and PyYAML is not installed",
                        next_step="python -m pip install pyyaml") from fault  # fmt: skip
    try:
        return yaml_list.load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as fault:
        raise BadParams(f"{source} is no YAML: {str(fault).splitlines()[0]}") from fault
