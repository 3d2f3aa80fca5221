"""Checkpoints beside their peers, in one run: `python bench/checkpoint.py [--size 300 1200] [--output json]`.

stall   training blocked: in the call, and before the optimizer's step
first   the same at the first save of a process
cost    extra training time until the save is durable, so hidden interference counts (peers that never fsync: ended)
final   a durable save with training stopped, against the same bytes written with O_DIRECT and fsynced
cpu     the same as cost in seconds of processor time of this process, which other programs disturb less
load    a cold load, against a cold raw read of the same file; ours verifies every byte, into fresh memory
fresh   what touching as many bytes of fresh memory takes, against that raw read: part of every load

Rounds are paired: floors and contenders take their turns in each round, ratios are made within it, medians are printed.
Peers take part in the first `--peer-rounds`. Exit 1 where a figure of ours is missed. Peers that are not installed, or
do not work here, are named with the reason and left out (`pip install --no-deps torch_checkpointing` for that one).
Where there is a CUDA device, a ResNet-50 and a model of 1 B parameters on it are measured as well (`--models`).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import mmap
import os
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spotheal.training import state
from spotheal.training.checkpoint import Store
from spotheal.training.slots import SUFFIX

CHUNK = 16 << 20


class Training:
    """A model with AdamW, BatchNorm included, and its steps. `kind`: see `model_of`."""

    def __init__(self, kind: str, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.device = torch.device(device)
        with self.device:
            self.model, self.inputs = model_of(kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.before_step: Callable[[], None] = lambda: None
        for _ in range(2):
            self.step()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def step(self) -> float:
        """One step; the seconds `before_step` took, which is a stall."""
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self.inputs).square().mean().backward()
        began = time.perf_counter()
        self.before_step()
        waited = time.perf_counter() - began
        self.optimizer.step()
        self.synchronize()
        return waited

    def tree(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def model_of(kind: str) -> tuple[nn.Module, torch.Tensor]:
    """A model and a batch: `300` (megabytes of state: linear layers and BatchNorm), `resnet50`, `transformer:1000` (M).

    ResNet-50: He et al., "Deep Residual Learning for Image Recognition", 2015, table 1, with 224 x 224 images.
    """
    name, _, size = kind.partition(":")
    if name == "resnet50":
        blocks: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        blocks.append(nn.MaxPool2d(3, 2, 1))
        width = 64
        for stage, count in enumerate((3, 4, 6, 3)):
            for number in range(count):
                blocks.append(Bottleneck(width, 64 << stage, 2 if stage and not number else 1))
                width = 256 << stage
        model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))
        return model, torch.randn(int(size or 32), 3, 224, 224)
    if name == "transformer":
        million = int(size or 1000)
        width = 2048 if million >= 500 else 256
        layers = max(1, round(million * 1e6 / (12 * width**2)))
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), torch.randn(4, 256, width)
    width = 1024
    layers_of: list[nn.Module] = []
    for _ in range(max(1, round(int(name) * 1e6 / 12 / width**2))):
        layers_of += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()]
    return nn.Sequential(*layers_of), torch.randn(64, width)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut: images of `inside` channels become such of 4 x `width`."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.body(images) + self.shortcut(images))


class Contender:
    """`save` returns when training may go on; `wait` when the save has ended. `durable`: that includes the disk."""

    name = ""
    durable = True
    needs_state = False  # loads into optimizer state that is there

    def __init__(self, training: Training, folder: Path) -> None:
        self.training, self.folder = training, folder
        self.number = 0
        folder.mkdir()

    def path(self) -> Path:
        self.number += 1
        for old in range(self.number - 2):
            with contextlib.suppress(OSError):
                old_path = self.folder / f"save-{old}"
                shutil.rmtree(old_path) if old_path.is_dir() else old_path.unlink()
        return self.folder / f"save-{self.number}"

    def save(self) -> None:
        raise NotImplementedError

    def wait(self) -> None:
        pass

    def busy(self) -> bool:
        return False

    def before_step(self) -> None:
        pass

    def load(self, path: Path, into: Training) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Ours(Contender):
    name = "spotheal"

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        self.store = Store(folder)
        self.parts = {"model": training.model, "optimizer": training.optimizer}
        self.store.prepare(state.gather(self.parts))

    def save(self) -> None:
        self.number += 1
        self.store.save(self.number, state.gather(self.parts), later=state.changed_by_step(self.training.optimizer))

    def before_step(self) -> None:
        self.store.wait_copied()

    def wait(self) -> None:
        outcome = self.store.flush()
        assert outcome is None or outcome.fault is None, outcome

    def busy(self) -> bool:
        return self.store.busy

    def load(self, path: Path, into: Training) -> None:
        store = Store(self.folder)  # as a resumed process has it: no buffer is at hand
        loaded = store.load()
        assert loaded is not None
        state.restore({"model": into.model, "optimizer": into.optimizer}, loaded.tree)
        store.close()

    def close(self) -> None:
        self.store.close()


class TorchSave(Contender):
    name = "torch.save"
    durable = False

    def save(self) -> None:
        torch.save(self.training.tree(), self.path())

    def load(self, path: Path, into: Training) -> None:
        _restore(into, torch.load(path, weights_only=True))


class TorchSaveDurable(TorchSave):
    name = "torch.save + fsync + rename"
    durable = True

    def save(self) -> None:
        path = self.path()
        with open(path.with_suffix(".tmp"), "wb") as file:
            torch.save(self.training.tree(), file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(path.with_suffix(".tmp"), path)


class Safetensors(Contender):
    name = "safetensors"
    durable = False

    def save(self) -> None:
        from safetensors.torch import save_file

        tensors, _ = state.pack(self.training.tree())
        save_file(tensors, self.path())

    def load(self, path: Path, into: Training) -> None:
        from safetensors.torch import load_file

        _, values = state.pack(self.training.tree())
        _restore(into, state.unpack(values, load_file(path)))


class Dcp(Contender):
    name = "DCP save"
    durable = False
    needs_state = True
    options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        self.future: Any = None

    def save(self) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.training.tree(), checkpoint_id=self.path(), no_dist=True)

    def load(self, path: Path, into: Training) -> None:
        import torch.distributed.checkpoint as dcp

        tree = into.tree()
        dcp.load(tree, checkpoint_id=path, no_dist=True)
        _restore(into, tree)


class DcpAsync(Dcp):
    name = "DCP async_save"

    def save(self) -> None:
        import torch.distributed.checkpoint as dcp

        self.future = dcp.async_save(self.training.tree(), checkpoint_id=self.path(), no_dist=True, **self.arguments())

    def arguments(self) -> dict[str, Any]:
        return {}

    def _upload(self) -> Any:
        return getattr(self.future, "upload_completion", self.future)

    def wait(self) -> None:
        if self.future is not None:
            self._upload().result()

    def busy(self) -> bool:
        return self.future is not None and not self._upload().done()


class DcpOverlap(DcpAsync):
    name = "DCP async_save, overlap"

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self.stager = DefaultStager(StagingOptions(False, True, True, False))

    def arguments(self) -> dict[str, Any]:
        return {"async_stager": self.stager}

    def before_step(self) -> None:
        if self.future is not None and hasattr(self.future, "staging_completion"):
            self.future.staging_completion.result()

    def close(self) -> None:
        self.stager.close()


class DcpProcess(DcpAsync):
    name = "DCP async_save, process"

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        import torch.distributed as dist

        if not dist.is_initialized():  # it starts a process that is a group of its own, and reads these
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def arguments(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        return {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}


class Lightning(TorchSave):
    name = "Lightning AsyncCheckpointIO"

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):  # torchvision's wheel beside a torch without CUDA: asked for at import only
            with contextlib.suppress(RuntimeError):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        self.library = library
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        self.io = AsyncCheckpointIO(TorchCheckpointIO())
        self.done = threading.Event()
        self.done.set()

    def save(self) -> None:
        self.io.save_checkpoint(self.training.tree(), self.path())
        self.done = done = threading.Event()
        assert self.io._executor is not None
        self.io._executor.submit(done.set)  # its one thread takes this after the save

    def wait(self) -> None:
        self.done.wait()

    def busy(self) -> bool:
        return not self.done.is_set()

    def close(self) -> None:
        self.io.teardown()


class TorchCheckpointing(Contender):
    """As its documentation says for training without CUDA, else its defaults. It never fsyncs."""

    name = "torch_checkpointing"
    durable = False
    needs_state = True

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        from torch_checkpointing import AsyncCheckpointSaverConfig, CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        # Its direct writes are not aligned: ext4 refuses them (0.1.1).
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        config = CheckpointManager.Config(save=AsyncCheckpointSaverConfig(), storage_config=storage)
        self.manager = CheckpointManager(config)
        self.manager.prewarm_staging(training.tree())
        self.future: Any = None

    def save(self) -> None:
        self.future = self.manager.save(str(self.path()), self.training.tree())

    def before_step(self) -> None:
        with self.manager.lock():
            pass

    def wait(self) -> None:
        if self.future is not None:
            self.future.result()

    def busy(self) -> bool:
        return self.future is not None and not self.future.done()

    def load(self, path: Path, into: Training) -> None:
        _restore(into, dict(self.manager.load(path, into=into.tree())))

    def close(self) -> None:
        self.manager.close()


def _restore(training: Training, tree: dict[str, Any]) -> None:
    training.model.load_state_dict(tree["model"])
    training.optimizer.load_state_dict(tree["optimizer"])


CONTENDERS: list[type[Contender]] = [
    Ours, TorchSave, TorchSaveDurable, Safetensors, Dcp, DcpAsync, DcpOverlap, DcpProcess, Lightning,
    TorchCheckpointing,
]  # fmt: skip


# --------------------------------------------------------------------------------------------------------- floors
class Floors:
    """What the machine can do with as many bytes, at this very moment."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size - size % CHUNK
        self.path = folder / "raw"
        self.memory = large_pages(2 * self.size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        ctypes.memset(self.address, 1, 2 * self.size)
        self.copy()

    def copy(self) -> float:
        return _timed(lambda: ctypes.memmove(self.address, self.address + self.size, self.size))

    def write(self) -> float:
        def write() -> None:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
            for at in range(0, self.size, CHUNK):
                os.pwrite(fd, memoryview(self.memory)[at : at + CHUNK], at)
            os.fsync(fd)
            os.close(fd)

        return _timed(write)

    def fresh(self) -> float:
        """Seconds to touch as many bytes that this process did not have: the machine's share of any load."""

        def touch() -> None:
            memory = large_pages(self.size)
            ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 0, self.size)

        return _timed(touch)

    def read(self, path: Path) -> float:
        def read() -> None:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            at = 0
            while count := os.preadv(fd, [memoryview(self.memory)[:CHUNK]], at):
                at += count
                if count % 4096:
                    break
            os.close(fd)

        drop_cache(path)
        return _timed(read)


def large_pages(size: int) -> mmap.mmap:
    """Fresh memory in the largest pages that the kernel gives, as ours: floors on small pages would be too easy."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def drop_cache(path: Path) -> None:
    for file in [path, *path.rglob("*")] if path.is_dir() else [path]:
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def newest(folder: Path) -> Path:
    paths = [path for path in folder.iterdir() if path.name.startswith(("save-", "step-"))]
    return max(paths, key=lambda path: int(path.name.removesuffix(SUFFIX).split("-")[1]))


# ------------------------------------------------------------------------------------------------------- measuring
def _timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def bare_steps(training: Training, steps: int) -> tuple[float, float]:
    """Seconds, and seconds of processor time, of a step with nothing beside it."""
    training.before_step = lambda: None
    began = time.process_time()
    wall = _timed(lambda: [training.step() for _ in range(steps)])
    return wall / steps, (time.process_time() - began) / steps


def one_round(contender: Contender, steps_min: int) -> dict[str, float]:
    """A save while training, followed until it has ended, between as many bare steps; then one with training stopped.

    The machine's speed drifts: what a step takes is taken from both sides of the save.
    """
    training = contender.training
    training.step()  # what was measured before has left the caches cold
    before = bare_steps(training, steps_min)
    training.before_step = contender.before_step
    cpu_began, began = time.process_time(), time.perf_counter()
    contender.save()
    stall = time.perf_counter() - began
    steps = 0
    while contender.busy() or steps < steps_min:
        stall += training.step()
        steps += 1
    contender.wait()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    bare, bare_cpu = (statistics.fmean(pair) for pair in zip(before, bare_steps(training, steps_min), strict=True))

    def final() -> None:
        contender.save()
        contender.wait()

    return {"stall": stall, "cost": seconds - steps * bare, "cpu": cpu - steps * bare_cpu, "final": _timed(final)}


def measure(
    kind: str, device: str, rounds: int, peer_rounds: int, folder: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    training, resumed = Training(kind, device), Training(kind, device)
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.pack(training.tree())[0].values())
    floors = Floors(size, folder)
    results: dict[str, dict[str, list[float]]] = {}
    contenders: list[Contender] = []
    left_out = {}
    for one in CONTENDERS:
        if one is not Ours and not peer_rounds:
            continue
        contender = None
        try:
            contender = one(training, folder / one.__name__)
            memcpy = floors.copy()
            first = one_round(contender, 1)["stall"]
        except (ImportError, OSError, RuntimeError, ValueError, TypeError, AssertionError) as fault:
            left_out[one.name] = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
            say(f"left out: {one.name}: {left_out[one.name]}")
            if contender is not None:
                with contextlib.suppress(OSError, RuntimeError):
                    contender.close()
            continue
        results[one.name] = {"first": [first], "first/memcpy": [first / memcpy]}
        contenders.append(contender)
    for number in range(rounds):
        say(f"{title(kind, device, size)}: round {number + 1} of {rounds}")
        for contender in contenders:
            if number < peer_rounds or isinstance(contender, Ours):
                for name, value in figures_of(contender, floors, resumed).items():
                    results[contender.name].setdefault(name, []).append(value)
                gc.collect()
    for contender in contenders:
        contender.close()
    medians = {
        name: {figure: statistics.median(values) for figure, values in figures.items()}
        | {"durable": next(one.durable for one in CONTENDERS if one.name == name)}
        for name, figures in results.items()
    }
    return {
        "state": title(kind, device, size),
        "bytes": size,
        "rounds": rounds,
        "memcpy": medians[Ours.name]["memcpy"],
        "contenders": medians,
        "left_out": left_out,
    }


def title(kind: str, device: str, size: int) -> str:
    name = "" if kind.isdigit() else f"{kind}, "
    return f"{name}{size / 1e6:.0f} MB on {device}"


def figures_of(contender: Contender, floors: Floors, resumed: Training) -> dict[str, float]:
    """One turn: the floors, then a save while training, a final one, and a cold load."""
    memcpy, raw = floors.copy(), floors.write()
    figures = one_round(contender, 3)
    if not contender.needs_state:
        resumed.optimizer.state.clear()  # as in a process that has just started
        gc.collect()
    fresh = floors.fresh()
    path = newest(contender.folder)
    raw_read = floors.read(path if path.is_file() else floors.path)
    drop_cache(path)
    load = _timed(lambda: contender.load(path, resumed))
    return figures | {
        "memcpy": memcpy,
        "raw": raw,
        "load": load,
        "stall/memcpy": figures["stall"] / memcpy,
        "cost/memcpy": figures["cost"] / memcpy,
        "cpu/memcpy": figures["cpu"] / memcpy,
        "final/raw": figures["final"] / raw,
        "load/raw": load / raw_read,
        "fresh/raw": fresh / raw_read,
    }


def verdicts(result: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Name, figure, limit."""
    ours = result["contenders"][Ours.name]
    peers = [figures for name, figures in result["contenders"].items() if name != Ours.name]
    best_stall = min((figures["stall"] for figures in peers), default=0.0)
    yield "stall / memcpy", ours["stall/memcpy"], 0.1
    yield "stall, ms (1.2 x best peer, or 1)", ours["stall"] * 1e3, max(1.2 * best_stall * 1e3, 1.0)
    yield "first save / memcpy", ours["first/memcpy"], 3.0
    yield "cost / memcpy", ours["cost/memcpy"], 2.0
    fsyncing = [figures["cost"] for figures in peers if figures["durable"]]
    if fsyncing:
        yield "cost / best peer that fsyncs", ours["cost"] / min(fsyncing), 0.5
    yield "final / raw write", ours["final/raw"], 1.3
    yield "cold verified load / raw read", ours["load/raw"], 1.6


def growth(small: dict[str, Any], large: dict[str, Any]) -> tuple[str, float, float]:
    """Cost a byte of the larger state against that of the smaller: 1 where it grows linearly."""
    costs = [result["contenders"][Ours.name]["cost"] / result["bytes"] for result in (small, large)]
    return "cost a byte, large / small", costs[1] / max(costs[0], 1e-15), 1.3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs="*", default=[300, 1200], help="megabytes of state")
    parser.add_argument("--models", nargs="*", help="default: resnet50 transformer:1000 where there is a CUDA device")
    parser.add_argument("--device", help="of these models; default: cuda where there is one, else cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--peer-rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; its filesystem is what is measured")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    options = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    cuda = torch.cuda.is_available()
    models = (["resnet50", "transformer:1000"] if cuda else []) if options.models is None else options.models
    device = options.device or ("cuda" if cuda else "cpu")
    states = [(str(size), "cpu") for size in sorted(options.size)] + [(model, device) for model in models]
    results = []
    for kind, where in states:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            results.append(measure(kind, where, options.rounds, options.peer_rounds, Path(folder), say))
    missed = False
    for number, result in enumerate(results):
        figures = list(verdicts(result))
        if 0 < number < len(options.size):
            figures.append(growth(results[0], result))
        result["verdicts"] = [
            {"figure": name, "value": value, "limit": limit, "met": value <= limit} for name, value, limit in figures
        ]
        missed = missed or not all(verdict["met"] for verdict in result["verdicts"])
    if options.output == "json":
        print(json.dumps({"schema_version": 1, "load_average": os.getloadavg(), "results": results}, indent=2))
    else:
        show(results)
        print(f"\nload average {os.getloadavg()[0]:.1f}; above 1 the times say little, the ratios more, the cpu most")
    return 1 if missed else 0


def show(results: list[dict[str, Any]]) -> None:
    for result in results:
        print(f"\n{result['state']}; memcpy {result['memcpy'] * 1e3:.0f} ms")
        print(
            f"{'':28}{'stall ms':>10}{'first ms':>10}{'cost ms':>10}{'cpu ms':>10}{'final/raw':>10}{'load/raw':>10}"
            "  durable"
        )
        for name, figures in result["contenders"].items():
            print(
                f"{name:28}{figures['stall'] * 1e3:10.1f}{figures['first'] * 1e3:10.1f}{figures['cost'] * 1e3:10.1f}"
                f"{figures['cpu'] * 1e3:10.1f}"
                f"{figures['final/raw']:10.2f}{figures['load/raw']:10.2f}  {'yes' if figures['durable'] else 'no'}"
            )
        ours = result["contenders"][Ours.name]
        print(f"touching fresh memory, part of a load: {ours['fresh/raw']:.2f} x raw read")
        for name, why in result["left_out"].items():
            print(f"{name:28}  left out: {why}")
        for verdict in result["verdicts"]:
            met = "met" if verdict["met"] else "MISSED"
            print(f"  {verdict['figure']:36}{verdict['value']:10.2f}  limit {verdict['limit']:8.2f}  {met}")


if __name__ == "__main__":
    sys.exit(main())
