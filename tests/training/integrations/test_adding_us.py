"""The lines that a script needs to go on exactly where it was: as the pages have them, applied and run."""

from __future__ import annotations

import random
import runpy
import subprocess
from pathlib import Path
from typing import Any

import adding_us
import interrupted
import pytest

torch = pytest.importorskip("torch")

from torchvision_here import torchvision_here

from spotheal.fleet.rehearsal.scenarios import weights as digests
from spotheal.training.session import SavedAndStopped, Session

torchvision_here()

pytestmark = pytest.mark.torch
LIBRARIES = {"lightning": "lightning", "transformers": "transformers", "keras": "keras", "accelerate": "accelerate"}
LINES_MAX = {"transforms": 10}  # the five for random transforms and prefetching on top


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")


def script(kind: str, page: Path, folder: Path) -> Path:
    """The user's script with the diff of `page` applied by git, which counts its lines."""
    path = folder / "train.py"
    path.write_text((adding_us.SCRIPTS / f"train_{kind}.py").read_text())
    diff = adding_us.on_page(page)[kind]
    said = subprocess.run(["git", "apply", "--numstat", "--apply", "-"], input=diff, cwd=folder,
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert int(said.stdout.split()[0]) <= LINES_MAX.get(kind, 5), said.stdout
    return path


def run(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int = 0) -> dict[str, Any]:
    """The weights that it leaves; SavedAndStopped if a notice comes in step `stop_at`."""
    after_step = Session.after_step

    def hears(self: Session, step: int, *arguments: Any, **named: Any) -> None:
        if step == stop_at:
            interrupted.notice(folder, self)
        after_step(self, step, *arguments, **named)

    with monkeypatch.context() as patch:
        for name, value in interrupted.environment(folder).items():
            patch.setenv(name, value)
        patch.setattr(Session, "after_step", hears)
        runpy.run_path(str(path), run_name="__main__")
    return weights(Path.cwd())


def weights(folder: Path) -> dict[str, Any]:
    if (folder / "model.pt").exists():
        return dict(torch.load(folder / "model.pt"))
    import h5py

    found: dict[str, Any] = {}
    with h5py.File(folder / "model.weights.h5") as file:
        file.visititems(
            lambda name, item: found.update({name: torch.tensor(item[()])} if hasattr(item, "shape") else {})
        )
    return found


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one) and one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def resumed_is_whole(kind: str, stops: tuple[int, ...], tmp_path: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    if kind in LIBRARIES:
        pytest.importorskip(LIBRARIES[kind], reason=f"needs {LIBRARIES[kind]}: pip install '.[integrations]'")
    path = script(kind, adding_us.PAGES[0], tmp_path)
    whole, place = run(path, tmp_path / "whole", patch), tmp_path / "spot"
    place.mkdir()
    for step in stops:
        with pytest.raises(SavedAndStopped):
            run(path, place, patch, stop_at=step)
        interrupted.gone(place)
    assert equal(run(path, place, patch), whole)
    return whole


@pytest.mark.parametrize("kind", adding_us.KINDS)
def test_with_the_lines_of_the_page_two_interruptions_change_no_weight(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    resumed_is_whole(kind, (4, 11), tmp_path, monkeypatch)
    assert "exact" not in caplog.text


@pytest.mark.parametrize("step", [1, 5, 6, 7, 12, 17])
def test_the_plain_loop_goes_on_exactly_at_any_step(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resumed_is_whole("plain", (step,), tmp_path, monkeypatch)


@pytest.mark.parametrize("kind", ["plain", "accelerate"])
def test_the_lines_change_no_weight_of_a_script_that_is_not_interrupted(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind in LIBRARIES:
        pytest.importorskip(LIBRARIES[kind], reason=f"needs {LIBRARIES[kind]}: pip install '.[integrations]'")
    ours = run(script(kind, adding_us.PAGES[0], tmp_path), tmp_path / "with", monkeypatch)
    assert equal(run(adding_us.SCRIPTS / f"train_{kind}.py", tmp_path / "without", monkeypatch), ours)


def test_a_script_that_seeds_only_torch_has_equal_weights_in_its_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`random` and NumPy are seeded by chance; the loader's copy of their states was counted as weights."""
    numpy = pytest.importorskip("numpy")
    path = script("plain", adding_us.PAGES[0], tmp_path)
    spot, reference = tmp_path / "spot", tmp_path / "reference"
    spot.mkdir()

    def machine(seed: int, folder: Path, stop_at: int = 0) -> None:
        random.seed(seed)
        numpy.random.seed(seed)
        run(path, folder, monkeypatch, stop_at)

    with pytest.raises(SavedAndStopped):
        machine(1, spot, stop_at=9)
    interrupted.gone(spot)
    machine(2, spot)
    machine(3, reference)
    one, other = digests.digest(spot), digests.digest(reference)
    assert one["sha256"] is not None
    assert one["sha256"] == other["sha256"]
    assert digests.apart(one["generators"], other["generators"]) == ("numpy", "python")


def test_three_pages_show_the_same_diffs() -> None:
    first, *others = [adding_us.on_page(page) for page in adding_us.PAGES]
    assert all(other == first for other in others)
