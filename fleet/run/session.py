"""The account and region of a verb, and its clients of AWS, each created at its first use."""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from functools import cached_property
from typing import Any

from spotheal.agent.aws.ec2 import Ec2
from spotheal.agent.protocol.errors import ConfigError, PermissionDenied, SpothealError
from spotheal.agent.protocol.names import REGION, StoreUrl, default_bucket

PLACEHOLDER_ACCOUNT = "000000000000"  # in a dry run without credentials, in place of the account's number


class Session:
    """`region` may be "" until a verb has read its files and calls `settle_region`."""

    def __init__(self, region: str = "", profile: str = "") -> None:
        self.profile = profile or os.environ.get("AWS_PROFILE", "")
        self._region = region or os.environ.get("AWS_REGION", "") or os.environ.get("AWS_DEFAULT_REGION", "")
        self._clients: dict[str, Any] = {}

    @property
    def region(self) -> str:
        if not self._region:
            self.settle_region()
        return self._region

    def settle_region(self, *candidates: str) -> str:
        """The first region of: the option, AWS_REGION, AWS_DEFAULT_REGION, `candidates`, the profile's."""
        if not self._region:
            self._region = next((region for region in candidates if region), "") or self._profile_region()
        if not self._region:
            raise ConfigError(
                "no region is set", next_step="--region REGION, AWS_REGION, `region` in job.toml or in the AWS profile"
            )
        if not re.fullmatch(REGION, self._region):
            raise ConfigError(f"{self._region!r} is no AWS region", next_step="write one such as us-west-2")
        return self._region

    def client(self, service: str, region: str = "") -> Any:
        from spotheal.agent.aws import clients

        key = f"{service} {region}"
        if key not in self._clients:
            self._clients[key] = clients.client(service, region or self.region, self._boto)
        return self._clients[key]

    def signed_url(self, method: str, url: StoreUrl, seconds: int) -> str:
        """An address for GET or PUT without credentials, valid for `seconds`, but not longer than `signing_seconds`."""
        from botocore.config import Config

        from spotheal.agent.aws.clients import translated

        if "signing" not in self._clients:
            endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT_URL_S3")
            config = Config(signature_version="s3v4", s3={"addressing_style": "path" if endpoint else "virtual"})
            self._clients["signing"] = self._boto.client("s3", region_name=self.region, config=config)
        operation = {"GET": "get_object", "PUT": "put_object"}[method]
        location = {"Bucket": url.bucket, "Key": url.prefix}
        with translated(f"sign an address of {url}"):
            return str(self._clients["signing"].generate_presigned_url(operation, Params=location, ExpiresIn=seconds))

    def signing_seconds(self, seconds_max: float) -> float | None:
        """How long an address that is signed now is valid, at most `seconds_max`: it ends with the session that signed
        it (S3 User Guide, "Sharing objects with presigned URLs"). None if temporary credentials name no end.
        """
        from botocore.credentials import RefreshableCredentials

        from spotheal.agent.aws.clients import translated

        with translated("read the AWS credentials"):
            credentials = self._boto.get_credentials()
            token = credentials.get_frozen_credentials().token
        if not isinstance(credentials, RefreshableCredentials):
            return None if token else seconds_max
        minutes = range(60, int(seconds_max) + 60, 60)
        return min(seconds_max, 60.0 * bisect_left(minutes, True, key=lambda end: credentials.refresh_needed(end)))

    @property
    def ec2(self) -> Ec2:
        return Ec2(self.client("ec2"))

    @cached_property
    def account(self) -> str:
        """The account's number; PermissionDenied without credentials."""
        from spotheal.agent.aws.clients import translated

        with translated("ask AWS which account this is"):
            return str(self.client("sts").get_caller_identity()["Account"])

    def check_profile(self) -> None:
        """PermissionDenied if the named profile does not exist; missing credentials are no error here."""
        if self.profile:
            _ = self._boto

    def has_credentials(self) -> bool:
        """Whether credentials are configured; it does not check that AWS accepts them."""
        from botocore.exceptions import BotoCoreError

        try:
            return self._boto.get_credentials() is not None
        except (BotoCoreError, SpothealError):
            return False

    def store_root(self, configured: str) -> StoreUrl:
        """The prefix above all jobs: `[store] url`, else the account's default bucket."""
        return StoreUrl.parse(configured) if configured else StoreUrl(default_bucket(self.account, self.region), "")

    @cached_property
    def _boto(self) -> Any:
        import boto3
        from botocore.exceptions import BotoCoreError

        try:
            return boto3.session.Session(profile_name=self.profile or None)
        except BotoCoreError as fault:
            raise PermissionDenied(str(fault), next_step="`aws configure list-profiles` lists the profiles") from fault

    def _profile_region(self) -> str:
        return str(self._boto.region_name or "")


def renewal(profile: str) -> str:
    """The command that renews expired credentials, by the kind of the profile in use."""
    if not profile and os.environ.get("AWS_SESSION_TOKEN"):
        return (
            "the credentials in AWS_ACCESS_KEY_ID and AWS_SESSION_TOKEN have ended: export new ones from where you got "
            "these, or unset both and name a profile with --profile"
        )
    name = profile or os.environ.get("AWS_PROFILE", "") or "default"
    chosen = f" --profile {name}" if name != "default" else ""
    settings = _settings(name)
    source = _settings(settings.get("source_profile", ""))
    if any(key in part for part in (settings, source) for key in ("sso_session", "sso_start_url")):
        login = settings if "sso_session" in settings or "sso_start_url" in settings else source
        chosen = chosen if login is settings else f" --profile {settings['source_profile']}"
        return f"`aws sso login{chosen}`, then the same command"
    if "login_session" in settings:
        return f"`aws login{chosen}`, then the same command"
    if "mfa_serial" in settings:
        return "type the same command in a terminal: it asks for the code of your MFA device"
    if "credential_process" in settings:
        return f"profile {name} gets its credentials from `{settings['credential_process']}`: sign in there again"
    return (
        f"`aws sso login{chosen}` if you sign in by SSO; else get new temporary credentials where you got these; if "
        "they are not temporary, look at this machine's clock"
    )


def _settings(profile: str) -> dict[str, str]:
    """A profile's lines in the configuration files; {} if there is none, or they cannot be read."""
    import botocore.session
    from botocore.exceptions import BotoCoreError

    try:
        settings = botocore.session.Session().full_config.get("profiles", {}).get(profile, {})
    except BotoCoreError:
        return {}
    return {key: str(value) for key, value in settings.items()}
