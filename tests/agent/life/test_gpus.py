"""Whether a machine has the GPUs that the job asks for, as a table; what becomes of its type is in tests/simulation."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from spotheal.agent.aws.s3 import Store
from spotheal.agent.life.gpus import (
    BARRED_LAUNCHES_MAX,
    Bars,
    Found,
    Need,
    Shortfall,
    decide_unsuitable,
    likely_cause,
    look,
    shortfall,
)
from spotheal.agent.protocol.clock import SystemClock, never
from spotheal.agent.protocol.errors import SetupFailed
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job import parse_job
from spotheal.agent.protocol.names import Phase, StoreUrl
from spotheal.fleet.rehearsal.services.client import InMemoryS3

T4, A10G, A100 = 15360, 23028, 40960


@pytest.mark.parametrize(
    ("need", "found", "lacks"),
    [
        (Need(), Found(on_bus=0, has_driver=False), None),
        (Need(1), Found((T4,), 1), None),
        (Need(1, 16), Found((T4,), 1), None),  # a card of 16 GiB shows 15
        (Need(1, 24), Found((A10G,), 1), None),
        (Need(1, 24), Found((T4,), 1), Shortfall("has 1 GPU of 15 GiB", True)),
        (Need(2, 24), Found((A10G,), 1), Shortfall("has 1 GPU of 22 GiB", True)),
        (Need(4), Found((T4,) * 4, 4), None),
        (Need(2, 40), Found((A100, T4), 2), Shortfall("has 2 GPUs of 15 GiB and 40 GiB", True)),
        (Need(1, 40), Found((A100, T4), 2), None),
        (Need(1), Found(on_bus=0, has_driver=False), Shortfall("has no NVIDIA GPU", True)),
        (Need(1), Found(on_bus=0, said="No devices were found"), Shortfall("has no NVIDIA GPU", True)),
        (Need(1), Found((A10G,), None), None),  # a kernel that shows no bus
        (Need(2), Found((A10G,), None), Shortfall("has 1 GPU of 22 GiB", True)),
        (
            Need(8),
            Found((A100,) * 7, 8),
            Shortfall("has GPUs that do not work: the driver shows 7 GPUs of 40 GiB of the 8 on the bus", False),
        ),
        (
            Need(1),
            Found(on_bus=1, said="No devices were found"),
            Shortfall(
                "has GPUs that do not work: the driver shows none (No devices were found) of the 1 on the bus", False
            ),
        ),
    ],
)
def test_what_a_machine_lacks(need: Need, found: Found, lacks: Shortfall | None) -> None:
    assert lacks == shortfall(need, found)


def test_an_image_without_the_driver_is_at_fault_and_no_type() -> None:
    with pytest.raises(SetupFailed, match="no NVIDIA driver"):
        shortfall(Need(1), Found(on_bus=1, has_driver=False))


@pytest.mark.parametrize(
    ("job", "need"),
    [
        ({}, Need()),
        ({"gpus": 2}, Need(2)),
        ({"gpu_memory_gib": 24}, Need(1, 24.0)),
        ({"gpus": 4, "gpu_memory_gib": 80}, Need(4, 80.0)),
        ({"nproc_per_node": "gpu"}, Need(1)),
        ({"nproc_per_node": 4}, Need()),  # ranks may be on the CPU
    ],
)
def test_what_the_job_asks_for(job: dict[str, Any], need: Need) -> None:
    document = {"name": "j", "repository": "https://example.org/r.git", "command": ["python", "t.py"], **job}
    config = InstanceConfig(parse_job({"job": document}), "R", "us-west-2", StoreUrl("b", "j/R"), "0" * 40, "")
    assert need == Need.of(config)


# --------------------------------------------------------------------------------------------------------- the facts
class Quick(SystemClock):
    passed = 0.0

    def monotonic(self) -> float:
        return self.passed

    def sleep(self, seconds: float, until: Any = None) -> bool:
        self.passed += seconds
        return False


@pytest.fixture()
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def smi(folder: Path, body: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "nvidia-smi").chmod(stat.S_IRWXU)


def bus(folder: Path, *devices: tuple[str, str]) -> Path:
    for number, (vendor, kind) in enumerate(devices):
        device = folder / "pci" / f"0000:00:{number:02x}.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    return folder / "pci"


def test_the_driver_says_how_much_memory_each_gpu_has(programs: Path, tmp_path: Path) -> None:
    smi(programs, '[ "$1" = --query-gpu=memory.total ] && printf "15360 MiB\\n23028 MiB\\n"')
    pci = bus(tmp_path, ("0x10de", "0x030200"), ("0x10de", "0x030000"), ("0x1d0f", "0x030000"), ("0x10de", "0x040300"))
    assert Found((T4, A10G), 2) == look(Quick(), never(), Need(1), pci)


def test_a_machine_without_a_gpu_is_not_waited_for(programs: Path, tmp_path: Path) -> None:
    smi(programs, "echo 'NVIDIA-SMI has failed'; exit 9")
    clock = Quick()
    found = look(clock, never(), Need(1), bus(tmp_path, ("0x1d0f", "0x030000")))
    assert (Found(on_bus=0, said="NVIDIA-SMI has failed"), 0.0) == (found, clock.passed)


def test_a_driver_that_is_still_loading_is_asked_again(programs: Path, tmp_path: Path) -> None:
    smi(programs, f"if [ -e {tmp_path}/up ]; then echo 23028 MiB; else touch {tmp_path}/up; echo no driver; exit 9; fi")
    assert Found((A10G,), 1) == look(Quick(), never(), Need(1), bus(tmp_path, ("0x10de", "0x030200")))


def test_a_driver_that_never_loads_is_waited_for_two_minutes(programs: Path, tmp_path: Path) -> None:
    smi(programs, "echo 'No devices were found'; exit 6")
    clock = Quick()
    found = look(clock, never(), Need(1), bus(tmp_path, ("0x10de", "0x030200")))
    assert (Found(on_bus=1, said="No devices were found"), 125.0) == (found, clock.passed)


def test_what_nvidia_smi_says_without_sense_is_no_gpu(programs: Path, tmp_path: Path) -> None:
    smi(programs, "echo '[N/A]'; echo; echo 'GPU 0: lost'")
    assert () == look(Quick(), never(), Need(1), bus(tmp_path, ("0x10de", "0x030200"))).memory_mib


def test_an_image_without_nvidia_smi_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("spotheal.agent.processes.programs.SYSTEM_FOLDERS", ())
    found = look(Quick(), never(), Need(1), bus(tmp_path, ("0x10de", "0x030200")))
    assert (1, False) == (found.on_bus, found.has_driver)


# ------------------------------------------------------------------------------------------------------------ the bars
def bars(store: Store, need: Need | None = None, requested_at: str = "t1") -> Bars:
    return Bars(store, need or Need(1, 24.0), requested_at)


def test_a_type_that_lacks_something_for_sure_is_barred_at_once() -> None:
    store = Store(InMemoryS3("b"), StoreUrl("b", "j/R"))
    assert "" == bars(store).reason("g4dn.xlarge")
    said = bars(store).add("g4dn.xlarge", "i-1", Shortfall("has 1 GPU of 15 GiB", True))
    assert "g4dn.xlarge has 1 GPU of 15 GiB, and the job asks for 1 GPU of 24 GiB or more" == said
    assert said == bars(store).reason("g4dn.xlarge")
    assert "" == bars(store).reason("g4dn.2xlarge")


def test_two_machines_are_needed_to_bar_a_type_whose_gpus_do_not_work() -> None:
    store = Store(InMemoryS3("b"), StoreUrl("b", "j/R"))
    for instance, barred in (("i-1", False), ("i-1", False), ("i-2", True)):
        bars(store).add("p4d.24xlarge", instance, Shortfall("has GPUs that do not work", False))
        assert barred == bool(bars(store).reason("p4d.24xlarge"))


def test_another_need_or_another_request_forgives() -> None:
    store = Store(InMemoryS3("b"), StoreUrl("b", "j/R"))
    bars(store).add("g4dn.xlarge", "i-1", Shortfall("has 1 GPU of 15 GiB", True))
    assert "" == bars(store, Need(1, 15.0)).reason("g4dn.xlarge")
    assert "" == bars(store, requested_at="t2").reason("g4dn.xlarge")


def test_barred_launches_end_the_run_when_there_is_nothing_else() -> None:
    one = {"outcome": "barred", "reason": "g4dn.xlarge has 1 GPU of 15 GiB"}
    other = {"outcome": "interrupted"}
    assert decide_unsuitable([one, other] * (BARRED_LAUNCHES_MAX - 2), "t3.large has no NVIDIA GPU") is None
    end = decide_unsuitable([one, other] * (BARRED_LAUNCHES_MAX - 1), "t3.large has no NVIDIA GPU")
    assert end is not None and end.phase is Phase.PARKED
    assert "Name other instance types" in end.reason and "[job] gpus" in end.reason  # true too if every type is barred
    assert "10 launches" in end.reason and "t3.large has no NVIDIA GPU; g4dn.xlarge has 1 GPU of 15 GiB" in end.reason


@pytest.mark.parametrize(
    ("words", "means"),
    [
        (["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"], "gpu_memory_gib"),
        (["  File x", "RuntimeError: No CUDA GPUs are available", ""], "[job] gpus = 1"),
        (["AssertionError: Torch not compiled with CUDA enabled"], "without CUDA"),
        (["RuntimeError: The NVIDIA driver on your system is too old (found version 11040)"], "newer image"),
        (["MemoryError"], ""),
        ([], ""),
    ],
)
def test_a_trainers_last_words_name_the_likely_cause(words: list[str], means: str) -> None:
    said = likely_cause(words)
    assert means in said and bool(means) == bool(said)
