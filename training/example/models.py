"""The example models, small changes to known ones. torchvision is imported only for the ResNets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from spotheal.agent.protocol.errors import ConfigError

RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101")


@dataclass(frozen=True)
class Network:
    """The network of the article."""

    hidden_nodes: Sequence[int] = (10, 20, 30)
    dropout_rate: float = 0.5
    activate_fn: str = "relu"


def build(name: str, channels: int, size: int, classes: int, network: Network | None = None) -> nn.Module:
    """A model for images of `channels` x `size` x `size`; `network` is for `dense` alone.

    ConfigError if torchvision is needed and unusable.
    """
    if name == "mlp":
        return mlp(channels * size * size, classes)
    if name == "dense":
        return dense(channels * size * size, classes, network or Network())
    if name == "convnet":
        return convnet(channels, size, classes)
    return resnet(name, channels, size, classes)


def mlp(features: int, classes: int, width: int = 128) -> nn.Module:
    """Two hidden layers with BatchNorm and dropout: small, yet with every kind of state a resume must carry."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs in (features, width):
        layers += [nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(width, classes))


def dense(features: int, classes: int, network: Network) -> nn.Module:
    """512 nodes, then dropout and a layer for each of `hidden_nodes`, then dropout of 0.2 and the classes' scores.

    Softmax is the loss's part. Weights begin as Keras's do: uniform by Glorot and Bengio, "Understanding the difficulty
    of training deep feedforward neural networks", 2010, and biases at 0.
    Source: `build_model` of the article "AWS Batch, distributed deep learning #2".
    """
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(features, 512), nn.ReLU()]
    width = 512
    for nodes in network.hidden_nodes:
        layers += [nn.Dropout(network.dropout_rate), nn.Linear(width, nodes), activation(network.activate_fn)]
        width = nodes
    layers += [nn.Dropout(0.2), nn.Linear(width, classes)]
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def activation(name: str) -> nn.Module:
    """One of hyperparameters.ACTIVATIONS, by Keras's name."""
    layers: Mapping[str, Callable[[], nn.Module]] = {
        "relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "elu": nn.ELU, "selu": nn.SELU, "gelu": nn.GELU,
        "silu": nn.SiLU, "swish": nn.SiLU, "softplus": nn.Softplus, "softsign": nn.Softsign,
        "leaky_relu": lambda: nn.LeakyReLU(0.3), "linear": nn.Identity,
    }  # fmt: skip
    return layers[name]()


def convnet(channels: int, size: int, classes: int, width: int = 32) -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    features = 2 * width * (size // 2) ** 2
    return nn.Sequential(
        *block(channels, width), *block(width, 2 * width), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.25),
        nn.Linear(features, classes),
    )  # fmt: skip


def resnet(name: str, channels: int, size: int, classes: int) -> nn.Module:
    """torchvision's ResNet; for images under 64 pixels with a 3x3 stem and no pooling.

    The stem made for 224 pixels would leave 32-pixel images 8x8 before the first block
    (He et al., "Deep Residual Learning for Image Recognition", section 4.2).
    """
    model: Any = getattr(torchvision_models(), name)(weights=None, num_classes=classes)
    small = size < 64
    if small or channels != 3:
        kernel, stride, padding = (3, 1, 1) if small else (7, 2, 3)
        model.conv1 = nn.Conv2d(channels, 64, kernel, stride, padding, bias=False)
    if small:
        model.maxpool = nn.Identity()
    return model  # type: ignore[no-any-return]


def torchvision_models() -> Any:
    """torchvision.models, imported now. ConfigError if it is absent, or made for another torch."""
    return _torchvision(lambda: __import__("torchvision.models", fromlist=["models"]))


def torchvision_datasets() -> tuple[Any, Any]:
    """torchvision.datasets and torchvision.transforms, imported now. ConfigError as above."""
    pair: tuple[Any, Any] = _torchvision(
        lambda: (
            __import__("torchvision.datasets", fromlist=["datasets"]),
            __import__("torchvision.transforms", fromlist=["transforms"]),
        )
    )
    return pair


def _torchvision(load: Callable[[], Any]) -> Any:
    try:
        return load()
    except ImportError as fault:
        raise ConfigError(
            f"torchvision cannot be imported: {fault}",
            next_step="install the torchvision that belongs to this torch, or use --dataset digits --model mlp",
        ) from fault
    except RuntimeError as fault:  # "operator torchvision::nms does not exist"
        raise ConfigError(
            f"torchvision is unusable beside torch {torch.__version__}: {fault}",
            next_step="install both from the same index, or use --dataset digits --model mlp",
        ) from fault


class Average:
    """An exponential moving average of a model's parameters, with a copy of its buffers."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._model = model
        self.values = {name: value.detach().clone() for name, value in model.state_dict().items()}

    @torch.no_grad()
    def update(self) -> None:
        """After each optimizer step."""
        for name, value in self._model.state_dict().items():
            if value.is_floating_point():
                self.values[name].lerp_(value, 1 - self.decay)
            else:
                self.values[name].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if state_dict.keys() != self.values.keys():
            raise ValueError("the averaged model has other tensors")
        for name, value in state_dict.items():
            self.values[name].copy_(value)
