"""Put a run together from the options of the example trainer."""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spotheal.agent.protocol.errors import ConfigError
from spotheal.training.distributed import Ranks
from spotheal.training.example import data, models
from spotheal.training.example.loop import Counters, Run
from spotheal.training.example.options import config_of, model_of, settled
from spotheal.training.sampler import ExactSampler, SeededSamples, exact_loader

AMP = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def build(options: argparse.Namespace, datasets: Path, saved_threads: int, ranks: Ranks | None = None) -> Run:
    """The run that `options` describe, at step 0. ConfigError if they cannot be had on this machine."""
    options = settled(options)
    device = device_of(options.device)
    amp = AMP[options.amp]
    gradient_scaler = scaler(device) if amp is torch.float16 else None
    if model_of(options) in models.RESNETS:
        models.torchvision_models()  # a missing package is reported before a data set is downloaded
    make_deterministic(options, saved_threads)
    ranks = ranks or Ranks()
    loaded = data.load(options.dataset, datasets) if ranks.rank == 0 else None
    ranks.first(True)  # so that rank 0 alone downloads
    loaded = loaded or data.load(options.dataset, datasets)
    network = models.Network(options.hidden_nodes, options.dropout_rate, options.activate_fn)
    model = models.build(model_of(options), loaded.channels, loaded.size, loaded.classes, network).to(device)
    forward = replicated(model, options.seed, ranks)
    sampler = ExactSampler(len(loaded.train), seed=options.seed, rank=ranks.rank, world_size=ranks.size)  # type: ignore[arg-type]
    samples = SeededSamples(loaded.train, options.seed) if loaded.augmented else loaded.train
    optimizer = optimizer_of(options, model, ranks.size)
    run = Run(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        scaler=gradient_scaler,
        average=models.Average(model, options.ema) if options.ema else None,
        sampler=sampler,
        train_loader=exact_loader(samples, sampler, options.batch_size, options.workers),
        valid_loader=exact_loader(
            loaded.valid,
            ExactSampler(len(loaded.valid), shuffle=False),  # type: ignore[arg-type]
            options.batch_size,
            options.workers,
        ),
        device=device,
        epochs=options.epochs,
        best=options.best,
        amp=amp,
        milestones=options.milestones,
        last_safe_step=options.at_notice == "last-safe-step",
        step_seconds_min=options.step_seconds,
        log_every=options.log_every,
        config=config_of(options),
        counters=Counters(epoch_loss=torch.zeros((), dtype=torch.float64, device=device)),
        ranks=ranks,
        forward=forward,
    )
    run.scheduler = scheduler_of(optimizer, run.steps_planned, options.warmup, options.schedule)
    return run


def replicated(model: nn.Module, seed: int, ranks: Ranks) -> nn.Module | None:
    """Rank 0's weights on every rank and gradients averaged over all; None for a single rank. Masks differ by rank."""
    if ranks.size == 1:
        return None
    torch.manual_seed(seed + 1_000_003 * ranks.rank)
    return nn.parallel.DistributedDataParallel(model)


def device_of(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as fault:
        raise ConfigError(f"--device {name}: {str(fault).splitlines()[0]}", next_step="use --device auto") from fault
    return device


def make_deterministic(options: argparse.Namespace, saved_threads: int) -> None:
    """Seeds, threads and kernels: the same options give the same bits on the same kind of machine."""
    if threads := options.threads or saved_threads:
        torch.set_num_threads(threads)
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(options.seed % 2**32)
    if not options.fast:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA begins
        torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms would import inductor: 1.8 s
        torch.backends.cudnn.benchmark = False


def scaled_rate(options: argparse.Namespace, ranks: int) -> float:
    """The rate for batches that are `ranks` times as large: in proportion (SGD), or with the root (Adam).

    Sources: Goyal et al., "Accurate, Large Minibatch SGD", 2017; Malladi et al., "On the SDEs and Scaling Rules for
    Adaptive Gradient Algorithms", 2022.
    """
    factors = {"no": 1.0, "linear": float(ranks), "sqrt": math.sqrt(ranks)}
    return float(options.lr * factors[options.scale_lr])


def optimizer_of(options: argparse.Namespace, model: nn.Module, ranks: int = 1) -> torch.optim.Optimizer:
    """The optimizer that `options` name; RMSprop, Adam and others have Keras's constants instead of torch's."""
    optim = torch.optim
    figures: dict[str, Any] = {"lr": scaled_rate(options, ranks), "weight_decay": options.weight_decay}
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "sgd": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
        "rmsprop": (optim.RMSprop, {"alpha": 0.9, "eps": 1e-7}),
        "adam": (optim.Adam, {"eps": 1e-7}),
        "adamw": (optim.AdamW, {}),
        "adagrad": (optim.Adagrad, {"eps": 1e-7}),
        "adadelta": (optim.Adadelta, {"rho": 0.95, "eps": 1e-7}),
        "adamax": (optim.Adamax, {"eps": 1e-7}),
        "nadam": (optim.NAdam, {"eps": 1e-7}),
    }
    kind, extras = kinds[options.optimizer]
    optimizer: torch.optim.Optimizer = kind(model.parameters(), **figures, **extras)
    return optimizer


def scheduler_of(
    optimizer: torch.optim.Optimizer, steps: int, warmup: float, schedule: str = "cosine"
) -> torch.optim.lr_scheduler.LambdaLR:
    """The rate rises, then falls as a cosine or stays. A closed form of the step, so that its state is one number."""
    rising = max(1, round(steps * warmup))

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        if schedule == "constant":
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - rising) / max(1, steps - rising))))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def scaler(device: torch.device) -> Any:
    """torch.amp.GradScaler since torch 2.3, torch.cuda.amp's before. ConfigError without CUDA: fp16 gains nothing."""
    if device.type != "cuda":
        raise ConfigError("--amp fp16 needs a CUDA device", next_step="use --amp bf16 or --amp off")
    if hasattr(torch.amp, "GradScaler"):
        return torch.amp.GradScaler("cuda")
    return torch.cuda.amp.GradScaler()
