"""Ways to save a checkpoint while training goes on: ours and the peers', behind one interface."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import torch
from example_training import Training

from spotheal.training import state
from spotheal.training.checkpoint import Store
from spotheal.training.slotfile import packing


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

        tensors, _ = packing.pack(self.training.tree())
        save_file(tensors, self.path())

    def load(self, path: Path, into: Training) -> None:
        from safetensors.torch import load_file

        _, values = packing.pack(self.training.tree())
        _restore(into, packing.unpack(values, load_file(path)))


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
