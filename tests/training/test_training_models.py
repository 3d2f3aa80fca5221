"""The example models and data sets, torchvision's among them."""

from __future__ import annotations

import hashlib
import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from spotheal.agent.protocol.errors import ConfigError, SpothealError
from spotheal.training.example import (
    data,
    models,
)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_a_resnet_for_small_images_keeps_their_size_in_the_stem(name: str, torchvision: Any) -> None:
    model = models.build(name, 3, 32, 10).eval()
    seen: list[Any] = []
    model.layer1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[-2:]))  # type: ignore
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    assert seen == [(32, 32)]


def test_a_resnet_for_large_images_is_torchvisions_own(torchvision: Any) -> None:
    own = torchvision.models.resnet18(num_classes=10).state_dict()
    assert {k: v.shape for k, v in models.build("resnet18", 3, 224, 10).state_dict().items()} == {
        k: v.shape for k, v in own.items()
    }


def test_an_unusable_torchvision_is_said_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise RuntimeError("operator torchvision::nms does not exist")

    with pytest.raises(ConfigError, match=r"unusable beside torch .*nms(.|\n)*--dataset digits"):
        models._torchvision(broken)


def test_digits_are_real_and_split_without_overlap(tmp_path: Path) -> None:
    loaded = data.load("digits", tmp_path)
    assert (len(loaded.train), len(loaded.valid)) == (1437, 360)  # type: ignore[arg-type]
    image, label = loaded.train[0]
    assert image.shape == (1, 8, 8)
    assert 0 <= label < 10


def test_fake_data_is_the_same_every_time(tmp_path: Path) -> None:
    first, second = data.load("fake", tmp_path), data.load("fake", tmp_path)
    assert torch.equal(first.train[7][0], second.train[7][0])


def test_cifar10_is_read_from_the_datasets_folder(
    tmp_path: Path, torchvision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_cifar10(tmp_path, monkeypatch)
    loaded = data.load("cifar10", tmp_path)
    assert (len(loaded.train), len(loaded.valid)) == (50, 10)  # type: ignore[arg-type]
    assert loaded.train[0][0].shape == (3, 32, 32)
    assert loaded.augmented


def test_cifar10_without_a_network_names_the_file_that_is_missing(
    tmp_path: Path, torchvision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "url", "http://127.0.0.1:9/cifar-10-python.tar.gz")
    with pytest.raises(SpothealError, match=r"cannot be downloaded(.|\n)*cifar-10-python\.tar\.gz into"):
        data.load("cifar10", tmp_path)


def make_cifar10(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive in CIFAR-10's format with 10 images a file, where torchvision looks for the real one."""
    from torchvision.datasets import CIFAR10

    generator = torch.Generator().manual_seed(1)

    def batch() -> bytes:
        pixels = torch.randint(0, 256, (10, 3072), generator=generator, dtype=torch.uint8).numpy()
        return pickle.dumps({"data": pixels, "labels": list(range(10))})

    files = {name: batch() for name, _ in CIFAR10.train_list + CIFAR10.test_list}
    files["batches.meta"] = pickle.dumps({"label_names": [str(n) for n in range(10)]})
    sums = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}
    with tarfile.open(folder / CIFAR10.filename, "w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"{CIFAR10.base_folder}/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5((folder / CIFAR10.filename).read_bytes()).hexdigest())
    monkeypatch.setattr(CIFAR10, "train_list", [[name, sums[name]] for name, _ in CIFAR10.train_list])
    monkeypatch.setattr(CIFAR10, "test_list", [[name, sums[name]] for name, _ in CIFAR10.test_list])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": sums["batches.meta"]})
