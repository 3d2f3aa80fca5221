"""An example to copy: a model of which every rank has its share (FSDP2), on machines that come and go.

    command = ["python", "train_fsdp.py"], nodes = "2:4"    in job.toml; torchrun is put in front of it
    torchrun --nproc_per_node=2 train_fsdp.py               by hand: SIGTERM saves, the same command goes on

What spotheal adds to a loop of one's own are the lines 1 to 4. Another number of ranks goes on with the very next
sample; `loop.after_step` ends the process with exit code 75 once a notice was heard, on any rank, and all is saved.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from spotheal.training.distributed import RankLost
from spotheal.training.example.export import export
from spotheal.training.sampler import ExactSampler, exact_loader
from spotheal.training.session import Loop, resume
from spotheal.training.sharded_session import ShardedSession

FEATURES, CLASSES, SAMPLES, WIDTH, BLOCKS = 64, 10, 1440, 64, 3


class Block(nn.Module):
    """What is sharded together: its parameters are whole on a rank only while it is at work."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 4 * width
        self.inner = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.inner(inputs)  # type: ignore[no-any-return]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    device, rank, size = join_the_others()

    torch.manual_seed(0)  # the same weights on every rank, of which each keeps its share
    blocks = [Block(WIDTH) for _ in range(BLOCKS)]
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), *blocks, nn.Linear(WIDTH, CLASSES)).to(device)
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    sampler = ExactSampler(SAMPLES, seed=1, rank=rank, world_size=size)                                            # 1
    loader = exact_loader(dataset(), sampler, options.batch_size)

    session = ShardedSession(save_every=options.save_every)                                                        # 2
    loop = resume(session, model=model, optimizer=optimizer, sampler=sampler)
    total = loop.step + steps_left(sampler, options.batch_size, options.epochs)
    with session.ranks.together():  # a rank that is lost is RankLost, whatever gloo or NCCL say about it
        for epoch in range(sampler.epoch, options.epochs):
            for inputs, targets in loader:
                step_start = time.monotonic()
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                time.sleep(max(0.0, options.step_seconds - (time.monotonic() - step_start)))
                loop.after_step(samples=len(inputs), loss=loss.detach(), steps_total=total)                        # 3
                if rank == 0 and loop.step % 50 == 0:
                    print(f"epoch {epoch + 1}  step {loop.step} of {total}  loss {loss.item():.4f}", flush=True)
            sampler.next_epoch()
        loop.finish()                                                                                              # 4
        write_results(loop)
    dist.destroy_process_group()


def join_the_others() -> tuple[torch.device, int, int]:
    """Device, rank and number of ranks. Another rank that does not answer for five minutes ends this one."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    return device, dist.get_rank(), dist.get_world_size()


def dataset() -> TensorDataset:
    """Points, and in which of ten directions they lie most: a task that can be learned, and needs no download."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(SAMPLES, FEATURES, generator=generator)
    return TensorDataset(points, (points @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1))


def steps_left(sampler: ExactSampler, batch_size: int, epochs: int) -> int:
    """With this number of ranks, which may not be the one that began the epoch."""
    later = max(0, epochs - sampler.epoch - 1) * -(-sampler.share // batch_size)
    return later + (-(-len(sampler) // batch_size) if sampler.epoch < epochs else 0)


def write_results(loop: Loop) -> None:
    """Rank 0 puts the whole model together; no rank ends, and with it its launcher, before it is there."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = dict(get_model_state_dict(loop.parts["model"], options=whole))
    if loop.session.ranks.rank == 0:
        folder = Path(os.environ.get("SPOTHEAL_RESULTS_DIR", "results"))
        export(folder / "model.safetensors", weights, {"step": loop.step})
        (folder / "metrics.json").write_text(json.dumps({"finished": True, "step": loop.step}) + "\n")
        print(f"done: {loop.step} steps, {folder / 'model.safetensors'}", flush=True)
    loop.session.ranks.first(True)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, metavar="N", help="%(default)s")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="of each rank: %(default)s")
    parser.add_argument("--lr", type=float, default=1e-3, metavar="RATE", help="%(default)s")
    parser.add_argument("--save-every", default="auto", metavar="WHEN", help="100 (steps), 30s, 5m; %(default)s")
    parser.add_argument("--step-seconds", type=float, default=0.0, metavar="SECONDS", help="at least, for rehearsals")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        main()
    except RankLost as fault:  # torchrun starts the ranks again, with those machines that are there
        sys.exit(f"error: {fault}")
