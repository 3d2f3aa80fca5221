"""What people get wrong with a loop of their own is said, and what they may do is not punished."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import interrupted
from interrupted import options

from spotheal.agent.protocol.errors import ConfigError, SpothealError
from spotheal.training.pace import Every
from spotheal.training.sampler import ExactSampler, SeededSamples, exact_loader
from spotheal.training.session import Loop, Session, resume

pytestmark = pytest.mark.torch


def begun(folder: Path, **parts: Any) -> Loop:
    model = interrupted.network()
    parts = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())} | parts
    return resume(Session(**options(folder, "1000")), **parts)


def test_a_step_without_its_samples_or_with_too_many_is_refused(tmp_path: Path) -> None:
    """Silently the sampler stood still, or ran ahead: the resumed run trained on other samples."""
    loop = begun(tmp_path, sampler=ExactSampler(20))
    with pytest.raises(ConfigError, match="0 samples of a step, where 20 are left"):
        loop.after_step()
    loop.after_step(samples=12)
    with pytest.raises(ConfigError, match="12 samples of a step, where 8 are left"):
        loop.after_step(samples=12)
    assert loop.step == 1
    loop.finish()


def test_to_finish_twice_is_harmless(tmp_path: Path) -> None:
    loop = begun(tmp_path)
    loop.after_step()
    loop.finish()
    loop.finish()


def test_what_has_no_state_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="thing is a object, which has no state_dict"):
        begun(tmp_path, thing=object())


def test_a_folder_that_cannot_be_written_is_refused_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"no checkpoint can be saved in .*file: it is a file, not a folder"):
        Session(tmp_path / "file", imds=False)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere but to what is mounted read-only
    with pytest.raises(ConfigError, match="read-only"):
        Session(tmp_path / "folder", imds=False)


def test_a_folder_may_be_given_for_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in interrupted.environment(tmp_path):
        monkeypatch.delenv(name, raising=False)
    loop = resume(tmp_path / "run", model=interrupted.network())
    assert loop.session.folder == tmp_path / "run"
    loop.finish()


def test_the_state_of_another_optimizer_is_refused_at_the_resume(tmp_path: Path) -> None:
    begun(tmp_path).finish()
    model = interrupted.network()
    with pytest.raises(SpothealError, match="not of a SGD: it has no dampening, momentum"):
        resume(
            Session(**options(tmp_path, "1000")),
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), momentum=0.9),
        )


def test_intervals() -> None:
    assert Every.parse("1h").seconds == 3600
    assert Every.parse(100).steps == 100  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1h"):
        Every.parse("0.5s")


def test_workers_that_stay_would_draw_for_the_wrong_epoch() -> None:
    samples = SeededSamples(interrupted.dataset())
    with pytest.raises(ValueError, match="persistent_workers"):
        exact_loader(samples, ExactSampler(8), 4, workers=1, persistent_workers=True)
    assert exact_loader(samples, ExactSampler(8), 4, num_workers=1, prefetch_factor=4).prefetch_factor == 4


PROGRAM = """
import sys, time, torch
from torch.utils.data import Dataset
from spotheal.training.sampler import ExactSampler, exact_loader
from spotheal.training.session import Session, resume

class Slow(Dataset):
    def __len__(self): return 4000
    def __getitem__(self, index): time.sleep(0.01); return torch.ones(4)

if __name__ == "__main__":
    model = torch.nn.Linear(4, 1)
    sampler = ExactSampler(4000)
    loop = resume(Session(sys.argv[1], imds=False), model=model, sampler=sampler,
                  optimizer=torch.optim.SGD(model.parameters()))
    for inputs in exact_loader(Slow(), sampler, 4, workers=2):
        loop.parts["optimizer"].zero_grad()
        model(inputs).mean().backward()
        loop.parts["optimizer"].step()
        loop.after_step(samples=len(inputs))
        print(loop.step, flush=True)
        if len(sys.argv) > 2 and loop.step == 3:
            sys.exit()
"""


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPOTHEAL_")}
    return subprocess.Popen(
        [sys.executable, str(folder / "program.py"), str(folder / "checkpoints"), *arguments],
        env=environment | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def test_a_notice_to_the_whole_process_group_ends_no_worker_and_loses_no_step(tmp_path: Path) -> None:
    """Workers died of it, and torch raised that in the midst of the last save: nothing was saved at all."""
    with started(tmp_path) as process:
        assert process.stdout is not None and process.stderr is not None
        steps = [int(process.stdout.readline()) for _ in range(3)]
        os.killpg(process.pid, signal.SIGTERM)
        said = process.stderr.read()
        steps += [int(line) for line in process.stdout.read().split()]
        assert process.wait(60) == 75, said
    assert f"step {steps[-1] + 1} is saved" in said
    assert (tmp_path / "checkpoints" / f"step-{steps[-1] + 1:09d}.safetensors").exists()
    limit = time.monotonic() + 20
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < limit:
            os.killpg(process.pid, 0)
            time.sleep(0.1)


def test_who_leaves_without_finish_is_told(tmp_path: Path) -> None:
    with started(tmp_path, "leave") as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "ends without `finish`" in said
