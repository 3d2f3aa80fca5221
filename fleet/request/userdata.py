"""The user data of a run, within EC2's limit. `spotheal.userdata` has the stub and its rules."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from typing import Any

from spotheal import userdata
from spotheal.agent.protocol.errors import ConfigError
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job import JobConfig
from spotheal.agent.protocol.names import StoreUrl
from spotheal.agent.protocol.redaction import looks_secret

LIMIT_BYTES = 16_384
_SECRET_NAME = re.compile(r"(?i)(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|PRIVATE_KEY|CREDENTIALS?)$")


def render(config: InstanceConfig, manifest_sha256: str) -> str:
    """The user data as text; ConfigError, which names the largest part, if it is more than EC2 accepts."""
    refuse_secrets(config.job)
    document = config.to_json()
    text = userdata.render(document, manifest_sha256)
    size = len(text.encode())
    if size > LIMIT_BYTES:
        share = len(userdata.packed(document))
        raise ConfigError(
            f"user data would be {size} bytes and EC2 takes {LIMIT_BYTES}: {share} of them are job.toml, compressed",
            next_step="move long commands and lists of [environment] into a file of the repository",
        )
    return text


def refuse_secrets(job: JobConfig) -> None:
    """ConfigError that names each field of job.toml with a value like a secret, and never repeats the value.

    Every process of the instance that may ask the metadata service, and everyone who may describe instances, can read
    user data.
    """
    paths = [path for path, text in _strings(job.to_document()) if looks_secret(text)]
    paths += [f"[environment] {name}" for name, value in job.environment.items() if _is_named_secret(name, value)]
    if paths:
        raise ConfigError(
            "\n".join(f"{path} holds what looks like a token, a key or a password" for path in dict.fromkeys(paths)),
            next_step="user data is no place for it: `fleetctl secret put NAME` puts it where only the trainer gets it,"
            " and [secrets] in job.toml names it",
        )


def _strings(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Each string of the document and its path, `[table] key`; of secrets the document has only the names."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _strings(item, f"{path} {name}" if path else f"[{name}]")
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item, path)


def _is_named_secret(name: str, value: str) -> bool:
    """The value of a variable such as WANDB_API_KEY looks like any hash; its name shows that it is a secret."""
    random = len(value) >= 16 and re.fullmatch(r"[A-Za-z0-9_+/=.-]+", value) and re.search(r"\d", value)
    return bool(random and re.search(r"[A-Za-z]", value) and _SECRET_NAME.search(name) and "/" not in value[:1])


def check_size(job: JobConfig) -> None:
    """ConfigError if the user data of a run of `job` would be too large; what a run adds has a fixed length."""
    run, store = "0" * 26, StoreUrl("b" * 40, f"{job.job.name}/{'0' * 26}")
    render(InstanceConfig(job, run, "us-west-2", store, "0" * 40, "2026-01-01T00:00:00Z"), "0" * 64)


def encoded(text: str) -> str:
    """The user data in the API's form, base64."""
    return base64.b64encode(text.encode()).decode()
