"""Where a secret lies, as job.toml writes it: `ssm:/path` or `secretsmanager:id`, with `#field` of a JSON document."""

from __future__ import annotations

import re
from dataclasses import dataclass

SERVICES = ("ssm", "secretsmanager")
LEGAL = '"ssm:/path" or "secretsmanager:id", with #field for one field of a JSON document'
_IDS = {
    "ssm": re.compile(r"/?[A-Za-z0-9_.-]+(?:/[A-Za-z0-9_.-]+)*(?::[A-Za-z0-9_.-]+)?"),  # a version or a label
    "secretsmanager": re.compile(r"[A-Za-z0-9/_+=.@:-]+"),  # a name or an ARN
}
_FIELD = re.compile(r"[^\s#]+")


@dataclass(frozen=True)
class SecretReference:
    service: str
    id: str
    field: str = ""

    @classmethod
    def parse(cls, text: str) -> SecretReference:
        """ValueError where `text` is none."""
        service, _, rest = text.partition(":")
        name, hash_, field = rest.partition("#")
        good = service in SERVICES and _IDS[service].fullmatch(name) and len(name) <= 1011
        if not good or (hash_ and not _FIELD.fullmatch(field)):
            raise ValueError(f"must be {LEGAL}")
        return cls(service, name, field)

    def __str__(self) -> str:
        return f"{self.service}:{self.id}" + (f"#{self.field}" if self.field else "")
