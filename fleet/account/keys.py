"""The snapshot that a job's volume begins from, and the KMS keys of both: checked before anything is created.

EC2 asks KMS only after it has answered CreateVolume, and then deletes the volume without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.errors import ConfigError, NotFound, PermissionDenied

if TYPE_CHECKING:
    from spotheal.agent.protocol.job import JobConfig
    from spotheal.fleet.run.session import Session


def check(session: Session, job: JobConfig) -> list[str]:
    """Notes on keys that could not be looked at. ConfigError for a key that makes no volume, and for a snapshot of a
    customer key that is not [volume] kms_key: instances get the use of that one alone. NotFound: no such snapshot."""
    own = job.volume.kms_key
    notes = []
    if own and own.split(":")[3] != session.region:
        raise ConfigError(
            f"[volume] kms_key: {own} is a key of another region than {session.region}",
            next_step="name a key of the run's region; EBS accepts no other",
        )
    key = _key_of_snapshot(session, job.volume.snapshot) if job.volume.snapshot else ""
    for named in dict.fromkeys(filter(None, (own, key))):
        try:
            metadata = _described(session, named)
        except PermissionDenied as error:
            if not error.code:
                raise
            notes.append(f"KMS key {named} was not checked: these credentials may not describe it")
            continue
        is_customers = metadata.get("KeyManager") == "CUSTOMER"
        if named != own and is_customers:
            raise ConfigError(
                f"[volume] snapshot: {job.volume.snapshot} is encrypted with the customer key {named}, which is not"
                " [volume] kms_key: the instances could not use it",
                next_step=f'write kms_key = "{named}" under [volume] in job.toml',
            )
        if metadata.get("KeyState") != "Enabled":
            raise ConfigError(
                f"KMS key {named} is {metadata.get('KeyState')}: EC2 makes no volume with it",
                next_step=f"`aws kms enable-key --key-id {named}` (`cancel-key-deletion` first, if it waits for"
                " deletion), or name another key",
            )
    return notes


def _key_of_snapshot(session: Session, snapshot: str) -> str:
    """The ARN of its key, "" if it is not encrypted."""
    with translated(f"describe {snapshot}"):
        filters = [{"Name": "snapshot-id", "Values": [snapshot]}]
        snapshots = session.client("ec2").describe_snapshots(Filters=filters)["Snapshots"]
    if not snapshots:
        raise NotFound(
            f"[volume] snapshot: there is no {snapshot} in account {session.account}, {session.region}",
            next_step="correct it in job.toml; `aws ec2 describe-snapshots --owner-ids self` lists your snapshots",
        )
    return str(snapshots[0].get("KmsKeyId") or "")


def _described(session: Session, key: str) -> dict[str, Any]:
    with translated(f"describe KMS key {key}"):
        return dict(session.client("kms").describe_key(KeyId=key)["KeyMetadata"])
