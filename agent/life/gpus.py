"""Whether this machine has the GPUs that the job asks for, and what follows for its instance type where it has not.

A type whose GPU is missing or too small would fail every time it is launched, and a fleet launches it again: it is
cheap, or there is capacity. So the type is barred for the run (`barred/<type>.json`), and a machine of it leaves at
once, which counts as no failure; another type gets its chance. Only facts bar: what the driver shows (nvidia-smi), and
what is on the bus. A fleet cannot be told to leave a type out, so it ends somewhere: `BARRED_LAUNCHES_MAX`.

What a machine costs that leaves so: the minutes since its launch, which AWS charges where a machine ends itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spotheal.agent.aws.s3 import Store
from spotheal.agent.processes import programs
from spotheal.agent.protocol.clock import Clock, Stop
from spotheal.agent.protocol.ends import BARRED, End
from spotheal.agent.protocol.errors import Fatal, Retryable, SetupFailed, SpothealError
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job_values import SHOWN_OF_NOMINAL
from spotheal.agent.protocol.names import LAYOUT, Phase

BARRED_LAUNCHES_MAX = 10  # without a checkpoint between them, each a few minutes of one instance
DRIVER_SECONDS_MAX = 120.0  # a driver may still be loading when the agent starts
_TRY_SECONDS = 5.0
_SMI_SECONDS_MAX = 60.0
_SMI = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader"]  # "23028 MiB" for each
PCI_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY_CLASS = "0x10de", "0x03"


@dataclass(frozen=True)
class Need:
    """What the job asks of a machine. `gpus` 0: nothing."""

    gpus: int = 0
    memory_gib: float = 0.0

    @classmethod
    def of(cls, config: InstanceConfig) -> Need:
        """A memory that is asked for, and a rank for each GPU, ask for one GPU at least."""
        job = config.job.job
        count_min = 1 if job.gpu_memory_gib or job.nproc_per_node == "gpu" else 0
        return cls(max(job.gpus, count_min), float(job.gpu_memory_gib))

    def __str__(self) -> str:
        return _cards(self.gpus) + (f" of {self.memory_gib:g} GiB or more" if self.memory_gib else "")


@dataclass(frozen=True)
class Found:
    """`memory_mib`: of each GPU that the driver shows. `on_bus`: NVIDIA's on the PCI bus, None where that is unknown.

    `said`: why the driver shows none, "" where it works. `has_driver`: there is an nvidia-smi.
    """

    memory_mib: tuple[int, ...] = ()
    on_bus: int | None = None
    said: str = ""
    has_driver: bool = True


@dataclass(frozen=True)
class Shortfall:
    """`sure`: it lies in the type. Else it may be this one machine that is broken, and two are needed to bar a type."""

    what: str
    sure: bool


def shortfall(need: Need, found: Found) -> Shortfall | None:
    """What the machine lacks, or None. Pure. SetupFailed where the image lacks the driver: no type has it then."""
    if not need.gpus:
        return None
    if found.on_bus == 0 and not found.memory_mib:
        return Shortfall("has no NVIDIA GPU", True)
    if not found.has_driver:
        raise SetupFailed(
            f"the job asks for {need}, and the machine image has no NVIDIA driver (no nvidia-smi)",
            next_step="choose an image with the driver (a deep learning AMI), or set [job] gpus = 0",
        )
    memory_min = need.memory_gib * 1024 * SHOWN_OF_NOMINAL
    if sum(mib >= memory_min for mib in found.memory_mib) >= need.gpus:
        return None
    all_shown = not found.said and (found.on_bus is None or found.on_bus <= len(found.memory_mib))
    if all_shown:
        return Shortfall(f"has {_in_words(found.memory_mib)}", True)
    machine_text = (
        f"shows {_in_words(found.memory_mib)}" if found.memory_mib else f"shows none ({found.said or 'no reason'})"
    )
    of_bus = "" if found.on_bus is None else f" of the {found.on_bus} on the bus"
    return Shortfall(f"has GPUs that do not work: the driver {machine_text}{of_bus}", False)


def _cards(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _in_words(memory_mib: tuple[int, ...]) -> str:
    if not memory_mib:
        return "no GPU that the driver shows"
    sizes = sorted({f"{mib / 1024:.0f} GiB" for mib in memory_mib})
    return f"{_cards(len(memory_mib))} of {' and '.join(sizes)}"


# What torch and CUDA say in a trainer's last words, and what it mostly means. Words bar no type: a leak, or a batch
# that is too large for every card, says the same.
_CAUSES = (
    (
        r"CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
        "the GPU's memory is too small for it: a smaller batch, or [job] gpu_memory_gib, which keeps to larger GPUs",
    ),
    (
        r"No CUDA GPUs are available|Found no NVIDIA driver|no CUDA-capable device|CUDA driver initialization failed",
        "the machine shows it no GPU: [job] gpus = 1 keeps to instance types that have one",
    ),
    (
        r"Torch not compiled with CUDA enabled|no kernel image is available for execution on the device",
        "its torch was built without CUDA, or not for this GPU: see [job] python and setup",
    ),
    (
        r"CUDA driver version is insufficient|NVIDIA driver on your system is too old",
        "the image's driver is too old for its torch: take a newer image",
    ),
)


def likely_cause(words: Iterable[str]) -> str:
    """What a trainer's last lines say of its GPU, as an addition to a reason; "" where they say nothing of it."""
    text = "\n".join(words)
    cause_of_words = next((cause for pattern, cause in _CAUSES if re.search(pattern, text)), "")
    return f"; likely {cause_of_words}" if cause_of_words else ""


# ----------------------------------------------------------------------------------------------------------- the look
def look(clock: Clock, stop: Stop, need: Need, pci_devices: Path = PCI_DEVICES) -> Found:
    """What this machine has; a driver that shows too little of what is on the bus is asked again for two minutes."""
    start = clock.monotonic()
    while True:
        gpus = _look_once(pci_devices)
        hopeless = not gpus.has_driver or gpus.on_bus == 0 or (not gpus.said and _shows_all(gpus))
        if hopeless or len(gpus.memory_mib) >= need.gpus or clock.monotonic() - start > DRIVER_SECONDS_MAX:
            return gpus
        if clock.sleep(_TRY_SECONDS, until=stop):
            return gpus


def _shows_all(found: Found) -> bool:
    return found.on_bus is None or len(found.memory_mib) >= found.on_bus


def _look_once(pci_devices: Path) -> Found:
    on_bus = _on_bus(pci_devices)
    try:
        result = programs.run(_SMI, seconds_max=_SMI_SECONDS_MAX)
    except Retryable as error:
        return Found(on_bus=on_bus, said=error.message)
    except Fatal:
        return Found(on_bus=on_bus, has_driver=False, said="there is no nvidia-smi")
    words = [line.split() for line in result.out.splitlines()]
    memory = tuple(int(line[0]) for line in words if len(line) == 2 and line[0].isdigit() and line[1] == "MiB")
    if result.code != 0 or not memory:
        return Found(on_bus=on_bus, said=result.said)
    return Found(memory, on_bus)


def _on_bus(pci_devices: Path) -> int | None:
    """NVIDIA's display and 3D controllers, without any driver; None where the kernel shows no bus."""
    try:
        devices = list(pci_devices.iterdir())
    except OSError:
        return None
    count = 0
    for device in devices:
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        count += vendor == _NVIDIA and kind.startswith(_DISPLAY_CLASS)
    return count


# ---------------------------------------------------------------------------------------------------------- the record
class Unsuitable(SpothealError):
    """This machine's type cannot run the job: it leaves, and another machine goes on."""


@dataclass(frozen=True)
class Bars:
    """The types that are barred for the run, as the store has them. A request that is made again forgives them all."""

    store: Store
    need: Need
    requested_at: str

    def reason(self, instance_type: str) -> str:
        """Why `instance_type` is barred; "" where it is not."""
        document = self._document(instance_type)
        barred = document is not None and (document["sure"] or len(document["instances"]) > 1)
        return f"{instance_type} {document['what']}, and the job asks for {self.need}" if document and barred else ""

    def add(self, instance_type: str, instance: str, lacks: Shortfall) -> str:
        """Note that `instance` lacks this; returns what is to be said of it."""
        known = self._document(instance_type)
        instances = sorted({instance, *(known["instances"] if known else ())})
        document = {
            "instance_type": instance_type,
            "what": lacks.what,
            "sure": lacks.sure or bool(known and known["sure"]),
            "instances": instances,
            "need": asdict(self.need),
            "requested_at": self.requested_at,
        }
        self.store.put_json(LAYOUT.barred(instance_type), document)
        return f"{instance_type} {lacks.what}, and the job asks for {self.need}"

    def _document(self, instance_type: str) -> dict[str, Any] | None:
        """None too where it was found under an earlier request, or for another need."""
        document = self.store.get_json(LAYOUT.barred(instance_type))
        if (
            document is None
            or document.get("requested_at") != self.requested_at
            or document.get("need") != asdict(self.need)
        ):
            return None
        return {"what": "", "sure": False, "instances": [], **document}


def decide_unsuitable(launches: Iterable[Mapping[str, Any]], reason: str) -> End | None:
    """Parked, where launches of barred types are all that the run gets; None: this one leaves, and another comes. Pure.

    `others`: the run's other launches since one gained a checkpoint.
    """
    barred = [launch for launch in launches if launch.get("outcome") == BARRED]
    if len(barred) + 1 < BARRED_LAUNCHES_MAX:
        return None
    reasons = dict.fromkeys([reason, *(str(launch.get("reason", "")) for launch in reversed(barred))])
    return End(
        Phase.PARKED,
        f"{len(barred) + 1} launches were of instance types that cannot run the job:"
        f" {'; '.join(filter(None, reasons))}."
        " Name other instance types in spot_fleet_config.json, or ask for less in [job] gpus and gpu_memory_gib;"
        " then `fleetctl request --resume`",
    )
