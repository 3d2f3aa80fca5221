"""The secrets of a job at AWS: put, list, delete. Their values are never read back, printed or logged.

Each job has its own path, which the instance's role may read: `/spotheal/<job>/NAME` in SSM's Parameter Store,
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
class StoredSecret:
    """A secret of the job at AWS, without its value."""

    name: str
    reference: SecretReference
    changed: str  # RFC 3339


def reference(job: str, name: str, store: str) -> SecretReference:
    """Where the job's secret `name` is stored. ConfigError if `name` is no valid name of a variable."""
    if not _NAME.fullmatch(name) or name.startswith("SPOTHEAL_"):
        raise ConfigError(
            f"{name!r} is no name of an environment variable of yours", next_step="use the name that the trainer reads"
        )
    if store not in SERVICES:
        raise ConfigError(f"--store {store!r} is none of {', '.join(SERVICES)}", next_step="--store ssm")
    return SecretReference(store, f"{'/' if store == 'ssm' else ''}spotheal/{job}/{name}")


def put(session: Session, secret: SecretReference, value: str, key: str = "") -> None:
    """Create the secret, or replace its value. `key`: the id or ARN of your own KMS key."""
    size, limit = len(value.encode()), SSM_BYTES_MAX if secret.service == "ssm" else MANAGER_BYTES_MAX
    if size > limit:
        hint = "; --store secretsmanager takes 65,536" if secret.service == "ssm" else ""
        raise ConfigError(f"the secret is {size} bytes, and {limit} are taken{hint}")
    if not value or "\0" in value:
        raise ConfigError(
            "the secret is empty" if not value else "the secret holds a zero byte, which no environment variable can",
            next_step="give it on standard input: `fleetctl secret put NAME < file`",
        )
    if secret.service == "ssm":
        key_settings = {"KeyId": key} if key else {}
        with translated(f"put the parameter {secret.id}"):
            session.client("ssm").put_parameter(
                Name=secret.id, Value=value, Type="SecureString", Overwrite=True, **key_settings
            )
        return
    manager = session.client("secretsmanager")
    try:
        with translated(f"create the secret {secret.id}"):
            manager.create_secret(Name=secret.id, SecretString=value, **({"KmsKeyId": key} if key else {}))
        return
    except (Fatal, Conflict) as error:
        if error.code == "InvalidRequestException" and "deletion" in error.message:
            name = secret.id.rpartition("/")[2]
            raise Conflict(
                error.message,
                next_step=f"`aws secretsmanager restore-secret --secret-id {secret.id}` brings it back,"
                f" `fleetctl secret rm {name} --store secretsmanager` deletes it for good; then put it again",
                code=error.code,
            ) from error
        if error.code != "ResourceExistsException":
            raise
    with translated(f"put the secret {secret.id}"):
        manager.put_secret_value(SecretId=secret.id, SecretString=value)


def stored(session: Session, job: str) -> list[StoredSecret]:
    """The job's secrets, sorted by name. Their values are not read."""
    secrets = []
    with translated("list the parameters of SSM"):
        pages = session.client("ssm").get_paginator("get_parameters_by_path").paginate(Path=f"/spotheal/{job}")
        for page in pages:
            secrets += [_stored("ssm", item["Name"], item.get("LastModifiedDate")) for item in page["Parameters"]]
    with translated("list the secrets of Secrets Manager"):
        pages = session.client("secretsmanager").get_paginator("list_secrets").paginate(
            Filters=[{"Key": "name", "Values": [f"spotheal/{job}/"]}]
        )
        for page in pages:
            listed = (secret for secret in page["SecretList"] if secret["Name"].startswith(f"spotheal/{job}/"))
            secrets += [_stored("secretsmanager", secret["Name"], secret.get("LastChangedDate")) for secret in listed]
    return sorted(secrets, key=lambda secret: (secret.name, secret.reference.service))


def _stored(service: str, name: str, changed: Any) -> StoredSecret:
    return StoredSecret(name.rpartition("/")[2], SecretReference(service, name), rfc3339(changed) if changed else "")


def remove(session: Session, secret: SecretReference) -> None:
    """Delete the secret; NotFound if there is none."""
    try:
        with translated(f"delete {secret}"):
            if secret.service == "ssm":
                session.client("ssm").delete_parameter(Name=secret.id)
            else:
                _delete_for_good(session.client("secretsmanager"), secret.id)
    except NotFound as error:
        raise NotFound(f"there is no secret {secret}", next_step="`fleetctl secret ls` lists them") from error


def _delete_for_good(manager: Any, name: str) -> None:
    """First with a recovery window: AWS answers a forced deletion of an unknown secret with success (DeleteSecret)."""
    try:
        with translated(f"delete {name}"):
            manager.delete_secret(SecretId=name)
    except Fatal as error:
        if error.code != "InvalidRequestException":  # it is scheduled for deletion already
            raise
    manager.delete_secret(SecretId=name, ForceDeleteWithoutRecovery=True)
