"""The allocator keeps what a step frees: seen by the kernel's own count of page faults, in processes of their own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from spotheal.training.allocator import keep_freed_memory

FAULTS = """
import resource, sys
from spotheal.training.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory({})
import torch

def step():
    large, small = torch.ones(48 << 20, dtype=torch.uint8), [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(8)]

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(kind: str) -> int:
    """Pages that five steps of 56 MB, 14,000 pages of 4 KiB each, take from the kernel."""
    done = subprocess.run([sys.executable, "-c", FAULTS, kind], check=True, capture_output=True, text=True)
    return int(done.stdout)


def test_what_a_step_frees_the_next_one_gets_without_the_kernel() -> None:
    assert faults("as it comes") > 5 * 48 * 256 / 2  # else there is nothing to win here
    assert faults("kept") < 1000


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_an_allocator_that_the_user_has_set_up_is_left_alone(name: str) -> None:
    assert not keep_freed_memory({name: "1"})


def test_another_libc_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not keep_freed_memory({})
