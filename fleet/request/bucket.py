"""The bucket of the store, before a request: whether it exists, and what it lacks. Nothing is changed here."""

from __future__ import annotations

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.errors import ConfigError, NotFound, PermissionDenied, SpothealError
from spotheal.fleet.run.session import Session

PUBLIC_BLOCKS = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")


def bucket_exists(session: Session, bucket: str) -> bool:
    """ConfigError if it is in another region: fleetctl's own client follows S3 there, an instance's bootstrap does
    not, and each boot would fail (finding recorded.md 3)."""
    try:
        with translated(f"look for bucket {bucket}"):
            region = session.client("s3").head_bucket(Bucket=bucket).get("BucketRegion", session.region)
    except NotFound:
        return False
    except PermissionDenied as error:
        raise PermissionDenied(
            f"bucket {bucket} cannot be used: it belongs to another account, or these credentials may not see it",
            next_step="name another in [store] url of job.toml",
            code=error.code,
            request_id=error.request_id,
        ) from error
    if region != session.region:
        raise ConfigError(
            f"bucket {bucket} is in {region}, and the run's instances are in {session.region}",
            next_step=f"name a bucket in {session.region} in [store] url of job.toml, or leave url out: request makes "
            f"one; or --region {region} with a fleet there",
        )
    return True


def bucket_notes(session: Session, bucket: str) -> list[str]:
    """Notes on an existing bucket. It is the user's: what it lacks of a bucket made by `request` is not changed."""
    try:
        with translated(f"read the public access block of bucket {bucket}"):
            answer = session.client("s3").get_public_access_block(Bucket=bucket)
            blocks = answer["PublicAccessBlockConfiguration"]
    except PermissionDenied:
        return []
    except SpothealError as error:
        if error.code != "NoSuchPublicAccessBlockConfiguration":
            raise
        blocks = {}
    if all(blocks.get(name) for name in PUBLIC_BLOCKS):
        return []
    settings = ",".join(f"{name}=true" for name in PUBLIC_BLOCKS)
    return [f"bucket {bucket} does not block public access: `aws s3api put-public-access-block --bucket {bucket} "
            f"--public-access-block-configuration {settings}` does"]  # fmt: skip
