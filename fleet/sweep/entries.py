"""The list of a sweep: YAML (or JSON, which is YAML), a list of mappings, on disk or in S3."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.errors import ConfigError, NotFound
from spotheal.agent.protocol.foreign_text import printable
from spotheal.agent.protocol.instance_config import ENTRIES_MAX
from spotheal.agent.protocol.names import StoreUrl
from spotheal.training import yaml_list
from spotheal.training.example import hyperparameters

if TYPE_CHECKING:
    from spotheal.fleet.run.session import Session

BYTES_MAX = 4 << 20
VALUES_MAX = 4 << 20  # aliases make ever so many of a few lines
Entry = dict[str, Any]


def read(source: str, session: Session) -> list[Entry]:
    """The entries of `source`, a path or `s3://bucket/key`; NotFound, or ConfigError that names every fault."""
    return parse(_text(source, session), source)


def parse(text: str, source: str) -> list[Entry]:
    """The entries that `text` lists. Values are values of JSON: a trainer gets them as JSON."""
    import yaml

    try:
        document = _from_json(text) or yaml_list.load(text)
    except yaml.YAMLError as fault:
        mark = getattr(fault, "problem_mark", None)
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = getattr(fault, "problem", None) or str(fault).splitlines()[0]
        raise ConfigError(f"{source}{place}: is no YAML: {problem}", next_step=f"correct {source}") from None
    except (ValueError, RecursionError) as fault:  # a date that is none; brackets too deep
        raise ConfigError(f"{source}: cannot be read: {fault}", next_step=f"correct {source}") from None
    if document is None:
        raise ConfigError(f"{source}: is empty; a sweep needs a list with at least one entry", next_step=_EXAMPLE)
    if not isinstance(document, list):
        raise ConfigError(f"{source}: must be a list of entries, and is a {_kind(document)}", next_step=_EXAMPLE)
    if not document:
        raise ConfigError(f"{source}: the list has no entry", next_step=_EXAMPLE)
    if len(document) > ENTRIES_MAX:
        raise ConfigError(f"{source}: {len(document)} entries; at most {ENTRIES_MAX} in one sweep",
                          next_step="cut the list in several sweeps, each a job of its own name")  # fmt: skip
    if _has_more_values(document, VALUES_MAX):
        raise ConfigError(f"{source}: its aliases make more than {VALUES_MAX} values of it",
                          next_step=f"write {source} without aliases")  # fmt: skip
    faults = [f"{source}: entry {index}: {wrong}" for index, entry in enumerate(document) if (wrong := _fault(entry))]
    if faults:
        raise ConfigError(_some(faults), next_step=f"correct {source}")
    return document


def refuse_unfit(entries: Sequence[Entry], command: Sequence[str], source: str) -> None:
    """ConfigError with entry, key and legal values, if `command` is the example trainer and would refuse an entry.
    The keys of other trainers are not known here."""
    model = hyperparameters.command_model(command)
    if model is None:
        return
    pairs = ((index, fault) for index, entry in enumerate(entries) for fault in hyperparameters.faults(entry, model))
    faults = [f"{source}: entry {index}: {fault}" for index, fault in pairs]
    if faults:
        raise ConfigError(_some(faults), next_step=f"correct {source}")


def uneven(entries: list[Entry]) -> list[str]:
    """Keys that only some entries have, each in a line: more often a slip of the pen than meant."""
    keys = {key for entry in entries for key in entry}
    notes = []
    for key in sorted(keys):
        having = [index for index, entry in enumerate(entries) if key in entry]
        if len(having) < len(entries):
            minority = having if len(having) <= len(entries) / 2 else sorted(set(range(len(entries))) - set(having))
            quantity = "only" if minority is having else "all but"
            places = ", ".join(str(index) for index in minority[:5]) + (", …" if len(minority) > 5 else "")
            noun = "entry" if len(minority) == 1 else "entries"
            verb = "has" if len(minority) == 1 and minority is having else "have"
            notes.append(f"{key!r}: {quantity} {noun} {places} {verb} it")
    return notes


_EXAMPLE = "a list looks like:\n    - {batch_size: 128, optimizer: rmsprop}\n    - {batch_size: 256, optimizer: adam}"


def _some(faults: list[str]) -> str:
    return "\n".join(faults[:10]) + (f"\n… and {len(faults) - 10} more" if len(faults) > 10 else "")


def _fault(entry: Any) -> str:
    if not isinstance(entry, dict):
        return f"must be a mapping of names to values, and is a {_kind(entry)}"
    strange = [key for key in entry if not isinstance(key, str)]
    if strange:
        return f"the name {strange[0]!r} must be text"
    if not _is_json(entry):
        name = next((key for key, value in entry.items() if not _is_json(value)), "a name")
        return f"{printable(name)}: must be numbers, text, true, false, null, or lists and mappings of those"
    return ""


def _from_json(text: str) -> Any:
    """None if it is none. YAML's reader does not know the pairs of escapes in which JSON writes an emoji."""
    if not text.lstrip().startswith("["):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


def _has_more_values(document: Any, limit: int) -> bool:
    count, stack = 0, [document]
    while stack and count <= limit:
        value = stack.pop()
        inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        count += 1 + len(inner)
        stack += inner
    return count > limit


def _is_json(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # half of a character is text to Python alone
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _kind(value: Any) -> str:
    return {dict: "mapping", str: "text", int: "number", float: "number", list: "list"}.get(type(value), "value")


def _text(source: str, session: Session) -> str:
    raw = _from_s3(source, session) if source.startswith("s3://") else _from_disk(source)
    if len(raw) > BYTES_MAX:
        raise ConfigError(f"{source}: {len(raw)} bytes; a list has at most {BYTES_MAX}")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise ConfigError(f"{source}: is no UTF-8 text: {fault}") from None


def _from_disk(source: str) -> bytes:
    try:
        if stat.S_ISFIFO(os.stat(source).st_mode) and not source.startswith("/dev/"):  # as `<(…)` of a shell is
            raise ConfigError(f"{source} is a pipe that may never end", next_step="write the list to a file")
        return Path(source).read_bytes()
    except FileNotFoundError:
        raise NotFound(f"there is no {source}", next_step=_EXAMPLE) from None
    except OSError as fault:
        raise ConfigError(f"{source} cannot be read: {fault}") from None


def _from_s3(source: str, session: Session) -> bytes:
    bucket, _, key = source.removeprefix("s3://").partition("/")
    try:
        StoreUrl.parse(f"s3://{bucket}")
    except ValueError:
        raise ConfigError(f"{bucket!r} is no name of a bucket", next_step="name the list as s3://bucket/key") from None
    if not key:
        raise ConfigError(f"{source} names no object", next_step="name the list as s3://bucket/key")
    with translated(f"read {source}"):
        answer = session.client("s3").get_object(Bucket=bucket, Key=key)
        return bytes(answer["Body"].read(BYTES_MAX + 1))
