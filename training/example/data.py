"""The example data sets, read from and cached in the datasets folder. Their libraries are imported late."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from spotheal.agent.protocol import contract
from spotheal.agent.protocol.errors import ConfigError, Retryable
from spotheal.training.example.export import keep
from spotheal.training.example.models import torchvision_datasets
from spotheal.training.slotfile.format import BrokenCheckpoint
from spotheal.training.slotfile.slots import read

CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
FAKE_SAMPLES = 2048


@dataclass(frozen=True)
class Data:
    """Images (float32, channels x size x size) with labels (int64)."""

    train: Dataset[Any]
    valid: Dataset[Any]
    channels: int
    size: int
    classes: int
    augmented: bool = False  # the training images are drawn with random transforms


def load(name: str, folder: Path) -> Data:
    """The data set `name`. ConfigError or Retryable, with the next step, if it is not available."""
    loaders: dict[str, Callable[[Path], Data]] = {
        "cifar10": cifar10, "mnist": mnist, "digits": digits, "fake": fake,
    }  # fmt: skip
    try:
        return loaders[name](folder)
    except OSError as fault:  # a folder that has the data set already may be read-only
        raise ConfigError(
            f"the data set {name} cannot be written to {folder}: {fault.strerror or fault}",
            next_step=f"name a folder in {contract.DATASETS_DIR} that this user may write to, or see `ls -ld`, `df -h`",
        ) from fault


def cifar10(folder: Path) -> Data:
    """CIFAR-10 through torchvision; downloaded if it is missing (or not whole: each file's md5 is checked).

    Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
    """
    datasets, transforms = torchvision_datasets()
    plain = [transforms.ToTensor(), transforms.Normalize(CIFAR10_MEAN, CIFAR10_STD)]
    random = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        root = os.fspath(folder)
        train = datasets.CIFAR10(root, train=True, transform=transforms.Compose(random + plain), download=True)
        valid = datasets.CIFAR10(root, train=False, transform=transforms.Compose(plain))
    except (OSError, RuntimeError) as fault:  # URLError is an OSError; torchvision says RuntimeError at a wrong md5
        raise Retryable(
            f"CIFAR-10 is not in {folder} and cannot be downloaded: {fault}",
            next_step=f"put cifar-10-python.tar.gz into {folder}, or use --dataset digits, which needs no network",
        ) from fault
    return Data(train, valid, 3, 32, 10, augmented=True)


def mnist(folder: Path) -> Data:
    """MNIST through torchvision, 60,000 images to train and 10,000 to validate, as numbers from 0 to 1.

    Downloaded where it is not there, each file by its md5. Source: LeCun et al., "Gradient-based learning applied to
    document recognition", 1998.
    """
    datasets, _ = torchvision_datasets()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        train, valid = (datasets.MNIST(os.fspath(folder), train=part, download=True) for part in (True, False))
    except (OSError, RuntimeError) as fault:
        raise Retryable(
            f"MNIST is not in {folder} and cannot be downloaded: {fault}",
            next_step=f"put its four .gz files into {folder / 'MNIST' / 'raw'}, or use --dataset digits, which needs no"
            " network",
        ) from fault
    pairs = [TensorDataset(dataset.data.unsqueeze(1).float().div(255), dataset.targets) for dataset in (train, valid)]
    return Data(pairs[0], pairs[1], 1, 28, 10)


def digits(folder: Path) -> Data:
    """1,797 real handwritten digits of 8 x 8 pixels that come with scikit-learn; every fifth one validates.

    Source: UCI "Optical Recognition of Handwritten Digits", through sklearn.datasets.load_digits.
    """
    cached = folder / "digits.safetensors"
    try:  # importing scikit-learn takes longer than a short life's whole training
        header, image = read(cached)
        tensors = image.tensors(header.layout, header.data_at)
        images, labels = tensors["images"].clone(), tensors["labels"].clone()
    except (BrokenCheckpoint, OSError, KeyError):
        images, labels = _bundled_digits()
        keep(cached, {"images": images, "labels": labels})
    held_out = torch.arange(len(labels)) % 5 == 0
    return Data(
        TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(images[held_out], labels[held_out]), 1, 8, 10
    )


def _bundled_digits() -> tuple[torch.Tensor, torch.Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as fault:
        raise ConfigError(
            f"the digits come with scikit-learn, which cannot be imported: {fault}",
            next_step="python -m pip install scikit-learn",
        ) from fault
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).div(16).sub(0.3).unsqueeze(1)
    return images, torch.tensor(bunch.target, dtype=torch.int64)


def fake(folder: Path) -> Data:
    """Random images of CIFAR-10's shape, the same on every machine: for measuring, not for learning."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(FAKE_SAMPLES, 3, 32, 32, generator=generator)
    labels = torch.randint(0, 10, (FAKE_SAMPLES,), generator=generator)
    cut = FAKE_SAMPLES * 7 // 8
    return Data(TensorDataset(images[:cut], labels[:cut]), TensorDataset(images[cut:], labels[cut:]), 3, 32, 10)
