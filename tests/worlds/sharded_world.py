"""Several real ranks over gloo, forked from a torch-preloaded server, and a small FSDP2 model for them to train."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked

Work = Callable[[int, int, Path, dict[str, Any]], Any]


def run(folder: Path, size: int, work: Work, /, preload: tuple[str, ...] = (), **given: Any) -> list[Any]:
    """What `work(rank, size, folder, given)` returned on each rank (JSON values); None for one that died."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("rank-*.json"):
        old.unlink()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = forked.context(*preload)
    processes = [context.Process(target=_rank, args=(rank, size, port, folder, work, given)) for rank in range(size)]
    for process in processes:
        process.start()
    try:
        until = time.monotonic() + 90
        for process in processes:
            process.join(max(0.1, until - time.monotonic()))
        assert not any(process.is_alive() for process in processes), "a rank hangs"
    finally:
        for process in processes:
            process.kill()
            process.join()
    files = [folder / f"rank-{rank}.json" for rank in range(size)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def _rank(rank: int, size: int, port: int, folder: Path, work: Work, given: dict[str, Any]) -> None:
    import torch.distributed as dist

    from spotheal.agent.protocol.errors import SpothealError

    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update(where, RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(TORCHELASTIC_RUN_ID="here", GROUP_RANK="0", OMP_NUM_THREADS="1")  # as torchrun does
    if not given.pop("uninitialized", False):
        dist.init_process_group("gloo")
    try:
        told = work(rank, size, folder, given)
    except SpothealError as fault:
        told = {"fault": type(fault).__name__, "why": str(fault)}
    beside = folder / f".rank-{rank}"
    beside.write_text(json.dumps(told))
    beside.rename(folder / f"rank-{rank}.json")
    sys.stdout.flush()
    os._exit(0)


# ------------------------------------------------------------------------------------------------------------ the model
def network(size: int) -> Any:
    """Sharded over `size` ranks; its last bias has one number, so that some ranks have nothing of it."""
    import interrupted
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(7)
    model = interrupted.network()
    mesh = init_device_mesh("cpu", (size,))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(tree: Any) -> Any:
    """Lists of numbers, the same on every rank, in the place of tensors."""
    import torch

    if isinstance(tree, dict):
        return {str(name): whole(value) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [whole(value) for value in tree]
    if isinstance(tree, torch.Tensor):
        return (tree.full_tensor() if hasattr(tree, "full_tensor") else tree).tolist()
    return tree
