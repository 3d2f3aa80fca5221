"""What several test modules share. Nothing here imports torch before a test asks for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

# What tests share (imds_server, training_runs, …) is imported by its bare name, whichever import mode pytest uses.
if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def torchvision() -> Any:
    """See torchvision_here."""
    from torchvision_here import torchvision_here

    return torchvision_here()
