"""The secrets of a job at AWS: put, list, delete. Their values are never read back, printed or logged.

Below one path a job, so that the instance's role may read them: `/spotheal/<job>/NAME` in SSM's Parameter Store,
`spotheal/<job>/NAME` in Secrets Manager.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.clock import rfc3339
from spotheal.agent.protocol.errors import ConfigError, Conflict, Fatal, NotFound
from spotheal.agent.protocol.secret_reference import SERVICES, SecretReference
from spotheal.fleet.run.session import Session

SSM_BYTES_MAX = 4096  # of a standard parameter, which costs nothing
MANAGER_BYTES_MAX = 65536
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


@dataclass(frozen=True)
class Kept:
    """A secret of the job as it lies at AWS."""

    name: str
    reference: SecretReference
    changed: str  # RFC 3339


def reference(job: str, name: str, store: str) -> SecretReference:
    """Where the job's secret `name` lies. ConfigError for a name that no variable can have."""
    if not _NAME.fullmatch(name) or name.startswith("SPOTHEAL_"):
        raise ConfigError(
            f"{name!r} is no name of an environment variable of yours", next_step="name it as the trainer reads it"
        )
    if store not in SERVICES:
        raise ConfigError(f"--store {store!r} is none of {', '.join(SERVICES)}", next_step="--store ssm")
    return SecretReference(store, f"{'/' if store == 'ssm' else ''}spotheal/{job}/{name}")


def put(session: Session, where: SecretReference, value: str, key: str = "") -> None:
    """Make it, or replace its value. `key`: id or ARN of a KMS key of one's own."""
    size, limit = len(value.encode()), SSM_BYTES_MAX if where.service == "ssm" else MANAGER_BYTES_MAX
    if size > limit:
        more = "; --store secretsmanager takes 65,536" if where.service == "ssm" else ""
        raise ConfigError(f"the secret is {size} bytes, and {limit} are taken{more}")
    if not value or "\0" in value:
        raise ConfigError(
            "the secret is empty" if not value else "the secret holds a zero byte, which no environment variable can",
            next_step="give it on standard input: `fleetctl secret put NAME < file`",
        )
    if where.service == "ssm":
        more_settings = {"KeyId": key} if key else {}
        with translated(f"put the parameter {where.id}"):
            session.client("ssm").put_parameter(
                Name=where.id, Value=value, Type="SecureString", Overwrite=True, **more_settings
            )
        return
    manager = session.client("secretsmanager")
    try:
        with translated(f"create the secret {where.id}"):
            manager.create_secret(Name=where.id, SecretString=value, **({"KmsKeyId": key} if key else {}))
        return
    except (Fatal, Conflict) as error:
        if error.code == "InvalidRequestException" and "deletion" in error.message:
            name = where.id.rpartition("/")[2]
            raise Conflict(
                error.message,
                next_step=f"`aws secretsmanager restore-secret --secret-id {where.id}` brings it back,"
                f" `fleetctl secret rm {name} --store secretsmanager` deletes it for good; then put it again",
                code=error.code,
            ) from error
        if error.code != "ResourceExistsException":
            raise
    with translated(f"put the secret {where.id}"):
        manager.put_secret_value(SecretId=where.id, SecretString=value)


def kept(session: Session, job: str) -> list[Kept]:
    """Those of the job, by name. Their values stay encrypted where they are."""
    found = []
    with translated("list the parameters of SSM"):
        pages = session.client("ssm").get_paginator("get_parameters_by_path").paginate(Path=f"/spotheal/{job}")
        for page in pages:
            found += [_kept("ssm", one["Name"], one.get("LastModifiedDate")) for one in page["Parameters"]]
    with translated("list the secrets of Secrets Manager"):
        pages = session.client("secretsmanager").get_paginator("list_secrets").paginate(
            Filters=[{"Key": "name", "Values": [f"spotheal/{job}/"]}]
        )
        for page in pages:
            named = (one for one in page["SecretList"] if one["Name"].startswith(f"spotheal/{job}/"))
            found += [_kept("secretsmanager", one["Name"], one.get("LastChangedDate")) for one in named]
    return sorted(found, key=lambda one: (one.name, one.reference.service))


def _kept(service: str, name: str, changed: Any) -> Kept:
    return Kept(name.rpartition("/")[2], SecretReference(service, name), rfc3339(changed) if changed else "")


def remove(session: Session, where: SecretReference) -> None:
    """NotFound if there is none."""
    try:
        with translated(f"delete {where}"):
            if where.service == "ssm":
                session.client("ssm").delete_parameter(Name=where.id)
            else:
                _delete_for_good(session.client("secretsmanager"), where.id)
    except NotFound as error:
        raise NotFound(f"there is no secret {where}", next_step="`fleetctl secret ls` lists them") from error


def _delete_for_good(manager: Any, name: str) -> None:
    """First with a recovery window: AWS answers a forced deletion of an unknown secret with success (DeleteSecret)."""
    try:
        with translated(f"delete {name}"):
            manager.delete_secret(SecretId=name)
    except Fatal as error:
        if error.code != "InvalidRequestException":  # it is scheduled for deletion already
            raise
    manager.delete_secret(SecretId=name, ForceDeleteWithoutRecovery=True)
