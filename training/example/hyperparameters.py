"""The legal entries of a sweep for the example trainer, and the faults of an entry. Standard library.

The first six names are those of the article "AWS Batch, distributed deep learning #2" (hyperparam_list.yml); the others
are the trainer's own options. `fleetctl sweep run` asks the same before anything is paid for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DATASETS = ("cifar10", "mnist", "digits", "fake")
MODELS = ("mlp", "dense", "convnet", "resnet18", "resnet34", "resnet50", "resnet101")
ACTIVATIONS = ("relu", "tanh", "sigmoid", "elu", "selu", "gelu", "silu", "swish", "softplus", "softsign", "leaky_relu",
               "linear")  # fmt: skip
SCHEDULES = ("cosine", "constant")
# The highest rate if none is given: Keras 2's, of the article's time; AdamW's is ours.
RATES: Mapping[str, float] = {
    "sgd": 0.01, "rmsprop": 0.001, "adam": 0.001, "adamw": 0.001, "adagrad": 0.01, "adadelta": 1.0, "adamax": 0.002,
    "nadam": 0.002,
}  # fmt: skip
OPTIMIZERS = tuple(RATES)
NETWORK = ("hidden_nodes", "dropout_rate", "activate_fn")  # of the article's network: the model `dense`
LAYERS_MAX, NODES_MAX = 64, 1 << 16  # a slip of the pen must not fill the machine's memory
MODULE = "spotheal.training"


@dataclass(frozen=True)
class Rule:
    """`what`: the legal values, in words."""

    what: str
    holds: Callable[[Any], bool]


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _one_of(names: Sequence[str]) -> Rule:
    return Rule(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value.lower() in names)


def _whole(low: int, high: int) -> Rule:
    return Rule(f"a whole number from {low} to {high}", lambda value: is_whole(value) and low <= value <= high)


def _number(limits: str, holds: Callable[[float], bool]) -> Rule:
    return Rule(f"a number {limits}", lambda value: is_number(value) and holds(value))


def _are_nodes(value: Any) -> bool:
    nodes = isinstance(value, list) and len(value) <= LAYERS_MAX
    return nodes and all(is_whole(width) and 0 < width <= NODES_MAX for width in value)


RULES: Mapping[str, Rule] = {
    "hidden_nodes": Rule(f"a list of at most {LAYERS_MAX} whole numbers from 1 to {NODES_MAX}, as [10, 20, 30]",
                         _are_nodes),
    "dropout_rate": _number("from 0 to below 1", lambda value: 0 <= value < 1),
    "activate_fn": _one_of(ACTIVATIONS),
    "optimizer": _one_of(OPTIMIZERS),
    "batch_size": _whole(1, 1 << 20),
    "epochs": _whole(1, 1 << 20),
    "lr": _number("above 0", lambda value: value > 0),
    "schedule": _one_of(SCHEDULES),
    "warmup": _number("from 0 to 1", lambda value: 0 <= value <= 1),
    "weight_decay": _number("from 0 on", lambda value: value >= 0),
    "ema": _number("from 0 to below 1", lambda value: 0 <= value < 1),
    "seed": _whole(0, (1 << 63) - 1),
    "model": _one_of(MODELS),
    "dataset": _one_of(DATASETS),
}  # fmt: skip


def faults(entry: Mapping[str, Any], model: str = "") -> list[str]:
    """Each fault of `entry` as `name: legal values`, in the entry's order; empty if the trainer accepts it.

    `model`: the command's own --model, which decides whether the article's names mean anything.
    """
    messages = []
    for name, value in entry.items():
        rule = RULES.get(name)
        if rule is None:
            messages.append(f"{name}: is not known; the trainer knows {', '.join(RULES)}")
        elif not rule.holds(value):
            messages.append(f"{name}: must be {rule.what}, and is {_shown(value)}")
    named = str(entry.get("model") or model or "dense").lower()
    network_keys = [name for name in NETWORK if name in entry]
    if network_keys and named != "dense":
        messages.append(f"{', '.join(network_keys)}: only the model dense has it, and the model is {named}")
    return messages


def normal(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entry with names of things in small letters, as Keras takes them."""
    return {name: value.lower() if isinstance(value, str) else value for name, value in entry.items()}


def command_model(command: Sequence[str]) -> str | None:
    """The --model of a command that runs the example trainer ("" if it names none); None of any other command."""
    words = list(command)
    if not any(word == "-m" and words[at + 1 : at + 2] == [MODULE] for at, word in enumerate(words)):
        return None
    for at, word in enumerate(words):
        if word.startswith("--model="):
            return word.partition("=")[2]
        if word == "--model" and at + 1 < len(words):
            return words[at + 1]
    return ""


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else f"{text[:59]}…"
