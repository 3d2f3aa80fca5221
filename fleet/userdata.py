"""The user data of a run, within EC2's limit. The stub and what may stand in it are `spotheal.userdata`'s."""

from __future__ import annotations

import base64

from spotheal import userdata
from spotheal.agent.config import InstanceConfig, JobConfig
from spotheal.agent.errors import ConfigError
from spotheal.agent.names import StoreUrl

LIMIT_BYTES = 16_384


def render(config: InstanceConfig, manifest_sha256: str) -> str:
    """The user data as text; ConfigError that names what is too large where it is more than EC2 takes."""
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


def check_size(job: JobConfig) -> None:
    """ConfigError where the user data of any run of `job` would be too large; what a run adds is of fixed length."""
    run, store = "0" * 26, StoreUrl("b" * 40, f"{job.job.name}/{'0' * 26}")
    render(InstanceConfig(job, run, "us-west-2", store, "0" * 40, "2026-01-01T00:00:00Z"), "0" * 64)


def encoded(text: str) -> str:
    """As the API takes it."""
    return base64.b64encode(text.encode()).decode()
