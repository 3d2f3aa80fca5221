"""The wheel, as users meet it: beside repositories with a `training/` of their own, and without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"agent", "fleet", "training", "userdata", "iam"}

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the checkout stays clean; with the setuptools that is here, so offline."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=ignore)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps", "--no-index"]
    done = run([*build, "--no-build-isolation", "--wheel-dir", str(folder), str(source)], folder)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("spotheal-*.whl"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the wheel, its requirements from here, and no torch.

    An import of torch or torchvision fails there as where they are not installed.
    """
    folder = tmp_path_factory.mktemp("environment")
    done = run([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder)
    assert done.returncode == 0, done.stderr
    site = next(folder.glob("lib/python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    here = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "requirements_from_here.pth").write_text(f"{_without_ours(Path(here), folder / 'requirements')}\n")
    return folder / "bin/python"


def _without_ours(here: Path, folder: Path) -> Path:
    """Links to what is installed here, without this project's editable install and without torch."""
    folder.mkdir()
    for entry in here.iterdir():
        if "spotheal" not in entry.name and not entry.name.lower().startswith(("torch", "functorch")):
            (folder / entry.name).symlink_to(entry)
    return folder


def run(argv: list[str], directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "AWS_", "SPOTHEAL_"))}
    return subprocess.run(
        argv, cwd=directory, env={**kept, **environment}, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(params=[True, False], ids=["with __init__", "without __init__"])
def repository(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A user's repository that has folders of the names ours have."""
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "model.py").write_text(f"WHOSE = 'the user, {package}'\n")
        if request.param:
            (tmp_path / package / "__init__.py").touch()
    (tmp_path / "agent/__main__.py").write_text("print('the code of the user ran')\n")
    return tmp_path


def test_the_wheel_installs_nothing_but_spotheal(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"spotheal"}
    assert {name.split("/")[1] for name in names if name.startswith("spotheal/")} == PACKAGES
    assert "spotheal/userdata/stub.sh" in names
    assert "spotheal/userdata/bootstrap.py" in names
    assert "spotheal/userdata/spotheal-agent.service" in names
    assert wheel.name.endswith("-py3-none-any.whl")


def test_every_module_of_the_checkout_is_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {f"spotheal/{path.relative_to(ROOT).as_posix()}" for p in PACKAGES for path in (ROOT / p).rglob("*.py")}
    assert modules - names == set()


def test_a_users_own_training_package_is_imported(python: Path, repository: Path) -> None:
    done = run([str(python), "-c", "import training.model as m; print(m.WHOSE)"], repository)
    assert (done.stdout, done.stderr) == ("the user, training\n", "")


def test_ours_is_imported_beside_it(python: Path, repository: Path) -> None:
    code = (
        "import training.model, spotheal.training, spotheal.agent.protocol.contract as c;"
        "print(training.model.WHOSE, c.JOB)"
    )
    assert run([str(python), "-c", code], repository).stdout == "the user, training SPOTHEAL_JOB\n"


def test_the_agent_runs_none_of_the_users_code(python: Path, repository: Path) -> None:
    done = run([str(python), "-I", "-m", "spotheal.agent", "--help"], repository)
    assert done.returncode == 0, done.stderr
    assert "the code of the user ran" not in done.stdout
    assert "run" in done.stdout


def test_fleetctl_runs_without_torch(python: Path, repository: Path) -> None:
    assert run([str(python), "-c", "import torch"], repository).returncode == 1
    done = run([str(python), "-I", "-c", "from spotheal.fleet.cli import main; main()", "--help"], repository)
    assert done.returncode == 0, done.stderr
    for verb in ("request", "status", "logs", "cancel", "rehearse"):
        assert verb in done.stdout


def test_fleetctl_validates_a_request_without_torch(python: Path, tmp_path: Path) -> None:
    (tmp_path / "spot_fleet_config.json").write_text("{")
    (tmp_path / "job.toml").write_text('[job]\nname = "a"\nrepository = "."\ncommand = ["x"]\n')
    argv = [str(python), "-I", "-c", "from spotheal.fleet.cli import main; main()", "validate"]
    done = run(argv, tmp_path)
    assert done.returncode == 2
    assert "spot_fleet_config.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_trainer_says_how_it_is_used(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    done = run([sys.executable, "-m", "spotheal.training", "--help"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--dataset" in done.stdout
