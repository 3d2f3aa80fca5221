"""The options of the example trainer, and the ones on which its weights depend."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, NoReturn

from spotheal.agent.protocol import contract
from spotheal.agent.protocol.errors import ConfigError
from spotheal.training.example import hyperparameters
from spotheal.training.example.hyperparameters import (
    ACTIVATIONS,
    DATASETS,
    MODELS,
    NETWORK,
    OPTIMIZERS,
    RATES,
    SCHEDULES,
)
from spotheal.training.pace import Every

THREADS_MAX, WORKERS_MAX, STEP_SECONDS_MAX = 4096, 1024, 86400  # a slip of the pen must not stop the machine
_NETWORK = {"hidden_nodes": [10, 20, 30], "dropout_rate": 0.5, "activate_fn": "relu"}  # if none is given
_EXAMPLE = f"""\
example, which needs no network; SIGTERM saves, and the same command goes on:
  python -m spotheal.training --dataset digits --epochs 40
By hand it uses ./datasets, ./checkpoints, ./results, or what {contract.DATASETS_DIR},
{contract.CHECKPOINT_DIR}, {contract.RESULTS_DIR} name. The agent sets them: to the volume."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line and the next step: the usage of thirty options would hide the fault."""
        self.exit(2, f"error: {message}\n  next: see `{self.prog} --help`\n")


def parser() -> argparse.ArgumentParser:
    options_parser = _Parser(
        prog="python -m spotheal.training",
        description="Train, save, resume exactly: the example trainer of spotheal.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # --epoch would mean --epochs until there is another option that begins so
    )
    _add_training(options_parser.add_argument_group("what is trained").add_argument)
    _add_network(options_parser.add_argument_group("the network of --model dense").add_argument)
    _add_saving(options_parser.add_argument_group("checkpoints").add_argument)
    _add_machine(options_parser.add_argument_group("machine").add_argument)
    return options_parser


def _add_training(add: Callable[..., object]) -> None:
    add("--dataset", choices=DATASETS, help="cifar10, with --model dense mnist; digits needs no network, fake no data")
    add("--model", choices=MODELS, metavar="NAME", help=f"{', '.join(MODELS)}; by data set resnet50, mlp, resnet18")
    add("--params", metavar="LIST", help="take the options of an entry of this list (YAML, JSON; on disk or s3://…)")
    add("--index", type=int, metavar="N", help="of the entry, from 0; below the agent it is told which")
    add("--epochs", type=ruled("epochs", int), default=20, metavar="N", help="%(default)s")
    add("--batch-size", type=ruled("batch_size", int), default=128, metavar="N", help="%(default)s")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", metavar="NAME", help=f"adamw; {', '.join(OPTIMIZERS)}")
    add("--lr", type=ruled("lr"), metavar="RATE", help="the highest, after the warm-up; by optimizer, adamw 0.001")
    add("--scale-lr", choices=("no", "linear", "sqrt"), default="no", help="by the number of ranks: %(default)s")
    add("--schedule", choices=SCHEDULES, help="of the rate: cosine, with --model dense constant")
    add("--weight-decay", type=ruled("weight_decay"), metavar="RATE", help="0.0005, with --model dense 0")
    add("--warmup", type=ruled("warmup"), metavar="SHARE", help="0.05 of the steps, the rate rises; --model dense: 0")
    add("--ema", type=ruled("ema"), default=0.0, metavar="DECAY", help="keep an average of the weights too, e.g. 0.999")
    add("--seed", type=ruled("seed", int), default=0, metavar="N", help="%(default)s")


def _add_network(add: Callable[..., object]) -> None:
    add("--hidden-nodes", type=nodes, metavar="N,N,…", help="after the first 512: 10,20,30")
    add("--dropout-rate", type=ruled("dropout_rate"), metavar="RATE", help="before each: 0.5")
    add("--activate-fn", choices=ACTIVATIONS, metavar="NAME", help=f"relu; {', '.join(ACTIVATIONS)}")


def _add_saving(add: Callable[..., object]) -> None:
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
    add(
        "--milestones",
        type=not_negative(int),
        default=0,
        metavar="EPOCHS",
        help="keep the checkpoint of every so many epochs for good; %(default)s, the default, keeps none",
    )
    add("--at-notice", choices=("now", "last-safe-step"), default="now", help="when to save and stop: %(default)s")
    add(
        "--interruption-hours",
        type=positive(float),
        metavar="HOURS",
        help="between two, for auto; default: as the agent counts them, else 2",
    )
    add("--no-imds", action="store_true", help="do not ask the instance metadata service for notices")


def _add_machine(add: Callable[..., object]) -> None:
    add("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:1, …")
    add("--amp", choices=("off", "bf16", "fp16"), default="off", help="mixed precision: %(default)s")
    add("--workers", type=up_to(WORKERS_MAX, int), default=0, metavar="N", help="DataLoader's: %(default)s")
    add(
        "--threads",
        type=up_to(THREADS_MAX, int),
        default=0,
        metavar="N",
        help="of the CPU; results depend on it; 0: as saved",
    )
    add("--fast", action="store_true", help="allow kernels that are not deterministic: a resume is then not exact")
    add("--log-every", type=positive(int), default=10, metavar="STEPS", help="%(default)s between lines of metrics")
    add(
        "--step-seconds",
        type=up_to(STEP_SECONDS_MAX, float),
        default=0.0,
        metavar="S",
        help="make steps so long, for rehearsals",
    )


def of_entry(options: argparse.Namespace, entry: dict[str, Any], index: int | None) -> argparse.Namespace:
    """`options` with an entry of a sweep over them. ConfigError with entry, key and legal values."""
    name = "the entry" if index is None else f"entry {index}"
    if messages := hyperparameters.faults(entry, options.model or ""):
        raise ConfigError(
            "\n".join(f"{name}: {message}" for message in messages), next_step="correct the list of the sweep"
        )
    values = hyperparameters.normal(entry)
    if not options.model and any(key in values for key in NETWORK):
        values = {"model": "dense"} | values
    merged = argparse.Namespace(**{**vars(options), **values})
    flags = [f"--{key.replace('_', '-')}" for key in NETWORK if getattr(options, key) is not None]
    # Where a sweep's entries name the models, the command's figures may be meant for some of them alone.
    if flags and "model" not in values and (model := model_of(merged)) != "dense":
        raise ConfigError(
            f"{', '.join(flags)}: only --model dense has it, and the model is {model}",
            next_step=f"add --model dense, or leave out {', '.join(flags)}",
        )
    return merged


def settled(options: argparse.Namespace) -> argparse.Namespace:
    """`options` with the defaults that depend on other options. The article trains its network at a constant rate."""
    dense = options.model == "dense"
    chosen = {
        "dataset": "mnist" if dense else "cifar10",
        "lr": RATES[options.optimizer],
        "schedule": "constant" if dense else "cosine",
        "weight_decay": 0.0 if dense else 5e-4,
        "warmup": 0.0 if dense else 0.05,
        **_NETWORK,
    }
    return argparse.Namespace(**{**vars(options), **{k: v for k, v in chosen.items() if getattr(options, k) is None}})


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options on which the weights depend; they are saved, and compared at a resume."""
    options = settled(options)
    names = ("dataset", "optimizer", "epochs", "batch_size", "lr", "weight_decay", "warmup", "ema", "seed", "amp")
    # Older checkpoints have none of these.
    later = {"scale_lr": "no", "schedule": "cosine"}
    extras = {name: getattr(options, name) for name, usual in later.items() if getattr(options, name) != usual}
    network = {name: getattr(options, name) for name in NETWORK} if model_of(options) == "dense" else {}
    return {"model": model_of(options), **{name: getattr(options, name) for name in names}, **extras, **network}


def model_of(options: argparse.Namespace) -> str:
    usual = {"cifar10": "resnet50", "mnist": "mlp", "digits": "mlp", "fake": "resnet18"}
    return str(options.model or usual[options.dataset or "cifar10"])


# -------------------------------------------------------------------------------------------------- values of options
def ruled(name: str, kind: Callable[[str], Any] = float) -> Callable[[str], Any]:
    """The command accepts the same values for `name` as an entry of a sweep."""
    rule = hyperparameters.RULES[name]
    return checked(kind, rule.what, rule.holds)


def positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    return checked(kind, "above 0", lambda value: 0 < value < math.inf)


def not_negative(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    return checked(kind, "0 or more", lambda value: 0 <= value < math.inf)


def up_to(limit: int, kind: Callable[[str], Any]) -> Callable[[str], Any]:
    return checked(kind, f"from 0 to {limit}", lambda value: 0 <= value <= limit)


def checked(kind: Callable[[str], Any], rule: str, holds: Callable[[Any], bool]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = kind(text)
        if not holds(value):
            raise argparse.ArgumentTypeError(f"must be {rule}, and is {text}")
        return value

    parse.__name__ = kind.__name__
    return parse


def nodes(text: str) -> list[int]:
    try:
        widths = [int(width) for width in text.split(",") if width.strip()]
    except ValueError:
        widths = [0]
    if not hyperparameters.RULES["hidden_nodes"].holds(widths):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 10,20,30")
    return widths


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
