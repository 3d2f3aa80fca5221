"""A program with us draws the numbers that it draws without us: from `random`, NumPy and torch, at every step."""

from __future__ import annotations

import ast
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

import interrupted

from spotheal.agent.aws.imds import Metadata
from spotheal.agent.protocol.clock import Stop, SystemClock
from spotheal.training.notice import Watcher
from spotheal.training.session import Session, resume

pytestmark = pytest.mark.torch
ROOT = Path(__file__).resolve().parents[2]
STEPS, MINUTE = 15, 60.0
REFUSED = "http://127.0.0.1:9"  # nothing listens on the discard port


class SharedClock(SystemClock):
    """Sleeps end as soon as the program has come so far: `reach` lets every thread sleep until `seconds`."""

    def __init__(self) -> None:
        self.slept: Counter[int] = Counter()
        self.reached = 0.0

    def sleep(self, seconds: float, until: Stop | None = None) -> bool:
        thread = threading.get_ident()
        self.slept[thread] += seconds  # type: ignore[assignment]
        while self.slept[thread] > self.reached:
            if until is not None and until.wait(0.001):
                return True
            time.sleep(0.001)
        return until is not None and until.is_set()

    def reach(self, seconds: float) -> None:
        self.reached = seconds
        until = time.monotonic() + 20
        while len(self.slept) < 2 or min(self.slept.values()) <= seconds:  # the files' thread, and that of IMDS
            assert time.monotonic() < until, self.slept
            time.sleep(0.001)


def program(loop: Any = None, clock: SharedClock | None = None, model: Any = None, optimizer: Any = None) -> list[Any]:
    """Everything that a seeded training has drawn, and its last weights."""
    loader, drawn = interrupted.loader(), []
    for step in range(STEPS):
        inputs, targets = next(iter(loader))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()  # draws the masks of Dropout
        optimizer.step()
        drawn += [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
        if clock is not None:
            clock.reach(MINUTE * (step + 1) / STEPS)
        if loop is not None:
            loop.after_step()
    return [*drawn, *(tensor.tolist() for tensor in model.state_dict().values())]


def seeded() -> dict[str, Any]:
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    model = interrupted.network()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def test_a_metadata_service_that_refuses_for_a_minute_changes_no_draw_and_no_weight(tmp_path: Path) -> None:
    without = program(**seeded())
    clock = SharedClock()
    parts = seeded()
    session = Session(**interrupted.options(tmp_path, save_every="1"))
    session.watcher = Watcher(metadata=Metadata(REFUSED, clock), clock=clock)
    loop = resume(session, **parts)
    beside = program(loop, clock, **parts)
    loop.finish()
    assert beside == without
    assert min(clock.slept.values()) >= MINUTE


# What draws or seeds on purpose: a restore at a resume, SeededSamples (it puts the generators back, or has a worker to
# itself), and the example trainers, which stand for the user's program.
ON_PURPOSE = {
    "training/state.py:set_rng_state", "training/sampler.py:__getitem__", "training/sampler.py:_draw",
    "training/example/build.py:replicated", "training/example/build.py:make_deterministic",
    "training/example/example_fsdp.py:main",
}  # fmt: skip
READS = {"Random", "SystemRandom", "getstate", "get_state", "get_rng_state", "default_rng", "Generator"}
TORCH = re.compile(r"(manual_)?seed(_all)?|rand\w*|bernoulli_?|normal_?|multinomial|random_|uniform_|set_rng_state")


def uses(path: Path) -> Iterator[str]:
    """`file:function` of each call that draws from a generator of the whole process, or sets one."""
    text = path.read_text(encoding="utf-8")
    if not re.search(r"random|seed|torch", text):
        return
    tree = ast.parse(text)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    for call in calls:
        owner, name = ast.unparse(call.func.value), call.func.attr  # type: ignore[attr-defined]
        is_own = owner.startswith("torch.Generator(") or any(word.arg == "generator" for word in call.keywords)
        of_torch = TORCH.fullmatch(name) and (owner.partition(".")[0] == "torch" or name.endswith("_"))
        if (owner in ("random", "numpy.random", "np.random") and name not in READS) or (of_torch and not is_own):
            inside = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
                      and node.lineno <= call.lineno <= (node.end_lineno or 0)]  # fmt: skip
            yield f"{path.relative_to(ROOT)}:{inside[-1] if inside else call.lineno}"


def test_nothing_that_a_trainers_process_imports_draws_from_its_generators() -> None:
    paths = [path for folder in ("agent", "training") for path in (ROOT / folder).rglob("*.py")]
    assert {use for path in paths for use in uses(path)} == ON_PURPOSE
