"""What the checkpoint benchmark trains: a model with AdamW, and its steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


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
