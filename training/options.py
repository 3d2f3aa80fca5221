"""The options of the example trainer, and those among them on which its weights depend."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from spotheal.training.pace import Every

DATASETS = ("cifar10", "digits", "fake")
MODELS = ("mlp", "convnet", "resnet18", "resnet34", "resnet50", "resnet101")
_EXAMPLE = """\
example, which needs no network; SIGTERM saves, and the same command goes on:
  python -m spotheal.training --dataset digits --epochs 40
By hand it uses ./datasets, ./checkpoints, ./results; below the agent, the volume."""


def parser() -> argparse.ArgumentParser:
    known = argparse.ArgumentParser(
        prog="python -m spotheal.training",
        description="Train, save, resume exactly: the example trainer of spotheal.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    data = known.add_argument_group("what is trained")
    add = data.add_argument
    add("--dataset", choices=DATASETS, default="cifar10", help="%(default)s; digits needs no network, fake no data")
    add("--model", choices=MODELS, metavar="NAME", help=f"{', '.join(MODELS)}; by data set resnet50, mlp, resnet18")
    add("--epochs", type=positive(int), default=20, metavar="N", help="%(default)s")
    add("--batch-size", type=positive(int), default=128, metavar="N", help="%(default)s")
    add("--optimizer", choices=("sgd", "adamw"), default="adamw", help="%(default)s")
    add("--lr", type=positive(float), default=1e-3, metavar="RATE", help="%(default)s, the highest, after the warm-up")
    add("--scale-lr", choices=("no", "linear", "sqrt"), default="no", help="by the number of ranks: %(default)s")
    add("--weight-decay", type=float, default=5e-4, metavar="RATE", help="%(default)s")
    add("--warmup", type=float, default=0.05, metavar="SHARE", help="%(default)s of the steps, while the rate rises")
    add("--ema", type=float, default=0.0, metavar="DECAY", help="also keep an average of the weights, e.g. 0.999")
    add("--seed", type=int, default=0, metavar="N", help="%(default)s")
    saving = known.add_argument_group("checkpoints")
    add = saving.add_argument
    add(
        "--save-every",
        type=every,
        default="auto",
        metavar="WHEN",
        help="100 (steps), 30s, 5m; %(default)s: as is cheap",
    )
    add(
        "--slots",
        type=at_least_two,
        default=3,
        metavar="N",
        help="%(default)s checkpoints are kept, overwritten in place",
    )
    add("--best", type=best, default="max:val_acc", metavar="WAY:METRIC", help='%(default)s; "": keep no best one')
    add("--milestones", type=int, default=0, metavar="EPOCHS", help="keep every so many epochs' checkpoint for good")
    add("--at-notice", choices=("now", "last-safe-step"), default="now", help="when to save and stop: %(default)s")
    add(
        "--interruption-hours",
        type=positive(float),
        default=2.0,
        metavar="HOURS",
        help="%(default)s between two; for auto",
    )
    add("--no-imds", action="store_true", help="do not ask the instance metadata service for notices")
    machine = known.add_argument_group("machine")
    add = machine.add_argument
    add("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:1, …")
    add("--amp", choices=("off", "bf16", "fp16"), default="off", help="mixed precision: %(default)s")
    add("--workers", type=int, default=0, metavar="N", help="DataLoader workers: %(default)s")
    add(
        "--threads",
        type=int,
        default=0,
        metavar="N",
        help="of the CPU; results depend on it; 0: as saved",
    )
    add("--fast", action="store_true", help="allow kernels that are not deterministic: a resume is then not exact")
    add("--log-every", type=positive(int), default=10, metavar="STEPS", help="%(default)s between lines of metrics")
    add("--step-seconds", type=float, default=0.0, metavar="SECONDS", help="make steps last so long, for rehearsals")
    return known


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options on which the weights depend; they are saved, and compared at a resume."""
    names = ("dataset", "optimizer", "epochs", "batch_size", "lr", "weight_decay", "warmup", "ema", "seed", "amp")
    scaled = {} if options.scale_lr == "no" else {"scale_lr": options.scale_lr}  # older checkpoints have no such option
    return {"model": model_of(options), **{name: getattr(options, name) for name in names}, **scaled}


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
