"""The article's network, list and data through the example trainer."""

from __future__ import annotations

import gzip
import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from spotheal.agent.protocol.contract import BATCH_INDEX, INDEX, PARAMS_FILE
from spotheal.agent.protocol.errors import ConfigError
from spotheal.training.__main__ import main
from spotheal.training.example import (
    build,
    data,
    hyperparameters,
    models,
    options,
)
from spotheal.training.params import LIST, params

ARTICLE = Path(__file__).resolve().parents[2] / "examples" / "hyperparam_list.yml"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty folder with no agent and no sweep, and torch's settings as they were afterwards."""
    for name in ("DATASETS_DIR", "CHECKPOINT_DIR", "RESULTS_DIR", "METRICS_FILE", "PROGRESS_FILE", "NOTICE_FILE"):
        monkeypatch.delenv(f"SPOTHEAL_{name}", raising=False)
    for name in (INDEX, BATCH_INDEX, PARAMS_FILE, LIST):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_deterministic_debug_mode("default")
    torch.set_num_threads(threads)


def shapes(model: Any) -> list[Any]:
    """The layers as the article writes them."""
    return [(type(one).__name__, getattr(one, "out_features", getattr(one, "p", None))) for one in model][1:]


def test_the_network_is_the_articles() -> None:
    first, second = (params(number, source=ARTICLE) for number in (0, 1))
    made = models.dense(784, 10, models.Network(first["hidden_nodes"], first["dropout_rate"], first["activate_fn"]))
    hidden = [(kind, size) for nodes in (10, 20, 30) for kind, size in
              (("Dropout", 0.2), ("Linear", nodes), ("ReLU", None))]  # fmt: skip
    assert shapes(made) == [("Linear", 512), ("ReLU", None), *hidden, ("Dropout", 0.2), ("Linear", 10)]
    made = models.dense(784, 10, models.Network(second["hidden_nodes"], second["dropout_rate"], second["activate_fn"]))
    assert shapes(made)[2:5] == [("Dropout", 0.7), ("Linear", 30), ("Tanh", None)]
    assert made(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.parametrize("name", hyperparameters.ACTIVATIONS)
def test_every_activation_that_is_allowed_is_there(name: str) -> None:
    assert models.activation(name)(torch.ones(1)).shape == (1,)


@pytest.mark.parametrize("name", hyperparameters.OPTIMIZERS)
def test_every_optimizer_that_is_allowed_lowers_the_loss_at_its_own_rate(name: str) -> None:
    torch.manual_seed(0)
    model = models.dense(4, 3, models.Network((5,), 0.0, "tanh")).eval()
    chosen = options.settled(options.parser().parse_args(["--model", "dense", "--optimizer", name]))
    optimizer = build.optimizer_of(chosen, model)
    assert optimizer.param_groups[0]["lr"] == hyperparameters.RATES[name]
    inputs, targets, losses = torch.randn(32, 4), torch.randint(0, 3, (32,)), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_the_articles_entry_trains_unchanged_and_the_best_is_kept(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one; the rehearsal of a sweep trains both."""
    safetensors = pytest.importorskip("safetensors.torch")
    monkeypatch.setenv(LIST, str(ARTICLE))
    monkeypatch.setenv(BATCH_INDEX, "1")
    monkeypatch.setenv("SPOTHEAL_PROGRESS_FILE", str(here / "progress.json"))
    assert main(["--dataset", "digits", "--no-imds", "--threads", "1"]) == 0
    found = json.loads((here / "results" / "metrics.json").read_text())
    entry = params(1, source=ARTICLE)
    assert {key: found["config"][key] for key in entry} == entry
    assert [found["config"][name] for name in ("model", "lr", "schedule")] == ["dense", 0.001, "constant"]
    lines = [json.loads(line) for line in (here / "results" / "metrics.jsonl").read_text().splitlines()]
    reached = [line["val_acc"] for line in lines if line.get("closes")]
    assert len(reached) == 20
    assert found["best"]["value"] == max(reached) > 0.8
    assert json.loads((here / "progress.json").read_text())["best_val_acc"] == max(reached)
    files = (here / "results" / "model" / f"{name}.safetensors" for name in ("model", "best"))
    last, best = (safetensors.load_file(path) for path in files)
    assert list(last) == list(best)


def test_an_entry_that_is_wrong_is_refused_with_exit_code_2_before_anything_is_trained(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "params.json").write_text('{"dropout_rate": 2, "hiden_nodes": [1]}')
    monkeypatch.setenv(PARAMS_FILE, str(here / "params.json"))
    monkeypatch.setenv(INDEX, "4")
    assert main(["--dataset", "digits"]) == 2
    said = capsys.readouterr().err
    assert "entry 4: dropout_rate: must be a number from 0 to below 1, and is 2" in said
    assert "entry 4: hiden_nodes: is not known; the trainer knows hidden_nodes, " in said
    assert not (here / "checkpoints").exists()


def test_an_index_without_a_list_is_a_usage_error(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dataset", "digits", "--index", "3"]) == 2
    assert "no list to take entry 3 from" in capsys.readouterr().err


def test_another_network_in_the_same_checkpoint_folder_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = ["--dataset", "digits", "--model", "dense", "--no-imds", "--epochs", "1"]
    assert main([*same, "--hidden-nodes", "8"]) == 0
    assert main([*same, "--hidden-nodes", "9"]) == 1
    assert "the checkpoint is of another run: hidden_nodes [8] -> [9]" in capsys.readouterr().err


def test_names_of_things_may_be_written_large_as_keras_takes_them() -> None:
    chosen = options.of_entry(options.parser().parse_args([]), {"optimizer": "RMSprop", "hidden_nodes": []}, 0)
    assert (chosen.optimizer, options.model_of(chosen)) == ("rmsprop", "dense")
    assert options.settled(chosen).dataset == "mnist"


def test_an_entry_without_the_articles_names_leaves_the_model_to_the_command() -> None:
    chosen = options.of_entry(options.parser().parse_args(["--dataset", "digits"]), {"lr": 0.5}, 0)
    assert (options.model_of(chosen), chosen.lr, options.settled(chosen).schedule) == ("mlp", 0.5, "cosine")
    with pytest.raises(ConfigError, match="only the model dense has it, and the model is mlp"):
        options.of_entry(options.parser().parse_args(["--model", "mlp"]), {"hidden_nodes": [1]}, 0)


def test_mnist_is_read_from_the_datasets_folder(
    tmp_path: Path, torchvision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_mnist(tmp_path, monkeypatch)
    loaded = data.load("mnist", tmp_path)
    assert (len(loaded.train), len(loaded.valid), loaded.channels, loaded.size) == (20, 10, 1, 28)  # type: ignore[arg-type]
    image, label = loaded.train[7]
    assert (image.shape, image.dtype, int(label)) == ((1, 28, 28), torch.float32, 7)
    assert 0.9 < float(image.max()) <= 1.0


def test_mnist_without_a_network_names_what_is_missing(
    tmp_path: Path, torchvision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", ["http://127.0.0.1:9/"])
    with pytest.raises(Exception, match=r"cannot be downloaded(.|\n)*four \.gz files into"):
        data.load("mnist", tmp_path)


def make_mnist(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The four files in MNIST's format, 20 images to train and 10 to validate, where torchvision looks for them."""
    from torchvision.datasets import MNIST

    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    resources = []
    for part, count in (("train", 20), ("t10k", 10)):
        pixels = torch.randint(0, 256, (count * 784,), dtype=torch.uint8).numpy().tobytes()
        bodies = {f"{part}-images-idx3-ubyte": struct.pack(">4I", 0x803, count, 28, 28) + pixels,
                  f"{part}-labels-idx1-ubyte": struct.pack(">2I", 0x801, count)
                  + bytes(number % 10 for number in range(count))}  # fmt: skip
        for name, body in bodies.items():
            (raw / f"{name}.gz").write_bytes(gzip.compress(body))
            (raw / name).write_bytes(body)
            resources.append((f"{name}.gz", hashlib.md5((raw / f"{name}.gz").read_bytes()).hexdigest()))
    monkeypatch.setattr(MNIST, "resources", resources)


@pytest.mark.parametrize(("rule", "factor"), [("no", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_rate_grows_with_the_ranks_where_that_is_asked(rule: str, factor: float) -> None:
    chosen = options.settled(options.parser().parse_args(["--scale-lr", rule, "--optimizer", "sgd", "--lr", "0.1"]))
    model = torch.nn.Linear(1, 1)
    assert build.optimizer_of(chosen, model).param_groups[0]["lr"] == pytest.approx(0.1)
    optimizer = build.optimizer_of(chosen, model, ranks=4)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * factor)
    assert options.config_of(chosen).get("scale_lr", "no") == rule, "a resume compares it"


@pytest.mark.parametrize(("schedule", "half"), [("cosine", 0.5), ("constant", 1.0)])
def test_the_rate_falls_as_a_cosine_or_stays(schedule: str, half: float) -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
    factor = build.scheduler_of(optimizer, 101, 0.0, schedule).lr_lambdas[0]
    assert [round(factor(step), 2) for step in (0, 1, 51)] == [1.0, 1.0, half]
