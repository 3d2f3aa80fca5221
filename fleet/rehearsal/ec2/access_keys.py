"""The access keys of one local cloud: anybody may know the ids; the secrets are random and of this cloud alone."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class AccessKey:
    """`token` is "" for a key that does not end."""

    id: str
    secret: str
    token: str = ""

    @property
    def environment(self) -> dict[str, str]:
        variables = {
            "AWS_ACCESS_KEY_ID": self.id,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_SESSION_TOKEN": self.token,
        }
        return {name: value for name, value in variables.items() if value}


class AccessKeys:
    """Secrets are derived from one random number, so that none has to be kept for each instance."""

    def __init__(self) -> None:
        self._seed = secrets.token_bytes(32)
        self._given: dict[str, AccessKey] = {}

    def of(self, key: str) -> AccessKey:
        """Temporary keys begin with ASIA (IAM User Guide, "Unique identifiers") and have a session token."""
        access_key = AccessKey(key, self.word("secret", key)[:40], self.word("token", key) if key[:4] == "ASIA" else "")
        return self._given.get(key, access_key)

    def add(self, key: AccessKey) -> None:
        """One whose secret somebody else has made."""
        self._given[key.id] = key

    def word(self, kind: str, name: str) -> str:
        """A word that nobody can guess, the same each time."""
        digest = hmac.digest(self._seed, f"{kind} {name}".encode(), hashlib.sha256)
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def profiles(keys: Mapping[str, AccessKey]) -> str:
    """Keys by the name of their profile, as the AWS CLI writes its credentials file."""
    parts = [f"[{name}]\naws_access_key_id = {key.id}\naws_secret_access_key = {key.secret}\n"
             for name, key in keys.items()]  # fmt: skip
    return "\n".join(parts)


def write_private(path: Path, text: str) -> None:
    """A file that no other user reads at any moment, whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    part.replace(path)
