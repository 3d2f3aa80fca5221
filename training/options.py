"""The options of the example trainer, and those among them on which its weights depend."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from spotheal.training import data, models
from spotheal.training.pace import Every


def parser() -> argparse.ArgumentParser:
    known = argparse.ArgumentParser(
        prog="python -m spotheal.training",
        description="Train, save, resume exactly: the example trainer of spotheal.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = known.add_argument
    add("--dataset", choices=data.NAMES, default="cifar10", help="digits needs no network, fake no data at all")
    add("--model", choices=models.NAMES, help="default: resnet50 for cifar10, mlp for digits, resnet18 for fake")
    add("--epochs", type=positive(int), default=20)
    add("--batch-size", type=positive(int), default=128)
    add("--optimizer", choices=("sgd", "adamw"), default="adamw")
    add("--lr", type=positive(float), default=1e-3, help="the highest learning rate, after the warm-up")
    add("--weight-decay", type=float, default=5e-4)
    add("--warmup", type=float, default=0.05, help="share of the steps in which the learning rate rises")
    add("--ema", type=float, default=0.0, metavar="DECAY", help="keep an average of the weights, e.g. 0.999; 0: none")
    add(
        "--save-every", type=every, default="auto", metavar="N|Ns|auto", help="steps (100), time (30s, 5m), or as cheap"
    )
    add("--log-every", type=positive(int), default=10, metavar="STEPS", help="steps between lines of metrics")
    add("--slots", type=at_least_two, default=3, help="checkpoints kept; their files are overwritten in place")
    add("--best", type=best, default="max:val_acc", metavar="max|min:METRIC", help='keep the best checkpoint; "": none')
    add("--milestones", type=int, default=0, metavar="EPOCHS", help="keep every so many epochs' checkpoint for good")
    add("--interruption-hours", type=positive(float), default=2.0, help="mean time between interruptions, for `auto`")
    add("--at-notice", choices=("now", "last-safe-step"), default="now", help="when to save and stop at a notice")
    add("--no-imds", action="store_true", help="do not poll the instance metadata service")
    add("--seed", type=int, default=0)
    add("--workers", type=int, default=0, help="DataLoader workers")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, …")
    add("--amp", choices=("off", "bf16", "fp16"), default="off")
    add("--threads", type=int, default=0, help="CPU threads; results depend on it; 0: as saved, else torch's choice")
    add("--fast", action="store_true", help="allow kernels that are not deterministic: a resume is then not exact")
    add(
        "--step-seconds",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="make every step last at least so long: only for rehearsals, whose models are too small to be interrupted",
    )
    return known


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options on which the weights depend; they are saved, and compared at a resume."""
    names = ("dataset", "optimizer", "epochs", "batch_size", "lr", "weight_decay", "warmup", "ema", "seed", "amp")
    return {"model": model_of(options), **{name: getattr(options, name) for name in names}}


def model_of(options: argparse.Namespace) -> str:
    return str(options.model or {"cifar10": "resnet50", "digits": "mlp", "fake": "resnet18"}[options.dataset])


# -------------------------------------------------------------------------------------------------- values of options
def positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    parse.__name__ = kind.__name__
    return parse


def at_least_two(text: str) -> int:
    if (value := int(text)) < 2:
        raise argparse.ArgumentTypeError("2 at least: while one is written another must be whole")
    return value


def every(text: str) -> Every:
    try:
        return Every.parse(text)
    except ValueError as fault:
        raise argparse.ArgumentTypeError(str(fault)) from fault


def best(text: str) -> str:
    names = ("val_acc", "val_loss", "train_loss")
    if text and text not in [f"{way}:{name}" for way in ("max", "min") for name in names]:
        raise argparse.ArgumentTypeError(f"{text!r} is not max: or min: with val_acc, val_loss or train_loss")
    return text
