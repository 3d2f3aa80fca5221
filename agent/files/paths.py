"""Where the agent keeps its own things on the instance, all below one root, as with DESTDIR.

The root is SPOTHEAL_ROOT, normally `/`. Another one lets the agent be run by hand without root, and lets several run
side by side on one machine. What a trainer is given is in `folders`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ROOT_VARIABLE = "SPOTHEAL_ROOT"


@dataclass(frozen=True)
class Paths:
    root: Path

    @classmethod
    def from_environment(cls) -> Paths:
        return cls(Path(os.environ.get(ROOT_VARIABLE) or "/"))

    @property
    def is_whole_machine(self) -> bool:
        """Whether the machine itself is ours: only then is systemd used, users made, power switched off."""
        return self.root == Path("/")

    @property
    def logs(self) -> Path:
        return self.root / "var/log/spotheal"

    def mount_point(self, mount: str) -> Path:
        return self.root / mount.lstrip("/")
