"""What trainers do, inside the cage: `workloads.py PART …` prints each part's name once it is done."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path


def workers() -> None:
    """Processes of a DataLoader, with tensors in shared memory."""
    _load("fork")


def spawned_workers() -> None:
    """They talk to a server over an abstract socket."""
    _load("forkserver")


def _load(context: str) -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(64.0))
    loader = DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context=context)
    assert sum(float(batch.sum()) for (batch,) in loader) == 2016.0


def _rank(rank: int, file: str) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    total = torch.ones(1) * (rank + 1)
    dist.all_reduce(total)
    assert total.item() == 3.0
    dist.destroy_process_group()


def gloo() -> None:
    """Two ranks that add their tensors up, over TCP."""
    import torch.multiprocessing as processes

    with tempfile.TemporaryDirectory() as folder:
        processes.start_processes(_rank, (f"{folder}/meeting",), nprocs=2, start_method="fork")


def compiled() -> None:
    """torch.compile: Inductor writes C++, starts compilers beside each other and loads what they made."""
    import torch

    function = torch.compile(lambda x: torch.sin(x) * 2 + x)
    x = torch.linspace(0, 1, 100)
    assert torch.allclose(function(x), torch.sin(x) * 2 + x)


def profiler() -> None:
    """torch.profiler, with stacks."""
    import torch

    with torch.profiler.profile(with_stack=True) as profile:
        torch.ones(10).sum()
    assert profile.key_averages()


def git() -> None:
    """A repository, a commit, a clone over its own transport."""
    environment = {**os.environ, "GIT_AUTHOR_NAME": "t", "GIT_AUTHOR_EMAIL": "t@e", "GIT_COMMITTER_NAME": "t",
                   "GIT_COMMITTER_EMAIL": "t@e"}  # fmt: skip
    for argv in (["init", "-q", "a"], ["-C", "a", "commit", "-q", "--allow-empty", "-m", "x"],
                 ["clone", "-q", f"file://{Path.cwd()}/a", "b"], ["-C", "b", "gc", "-q"]):  # fmt: skip
        subprocess.run(["git", *argv], check=True, env=environment)


def pip() -> None:
    """An environment of its own, and a package of this folder in it."""
    Path("package").mkdir()
    Path("package/pyproject.toml").write_text('[project]\nname = "caged"\nversion = "1"\n')
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-build-isolation", "--no-deps"]
    subprocess.run([*install, "--target", "installed", "./package"], check=True)
    assert list(Path("installed").glob("caged-*"))


def tracker() -> None:
    """W&B, offline: its service is a program of its own, which our process talks to over a socket."""
    import wandb

    with wandb.init(mode="offline", project="p") as run:
        run.log({"loss": 1.0})


def sampler() -> None:
    """py-spy reads the memory of a process of its own user."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        time.sleep(1)
        seen = subprocess.run(["py-spy", "dump", "--pid", str(child.pid)], capture_output=True, text=True)
        child.kill()
    assert "MainThread" in seen.stdout, seen.stderr


def installer() -> None:
    """uv makes an environment."""
    subprocess.run(["uv", "venv", "--quiet", "--offline", "--python", sys.executable, "environment"], check=True)


def subprocesses() -> None:
    """Threads, pipes and programs of C, as each trainer starts them."""
    source = Path("hello.c")
    source.write_text(
        "#include <pthread.h>\nvoid *f(void *x) { return x; }\n"
        "int main(void) { pthread_t t; return pthread_create(&t, 0, f, 0) || pthread_join(t, 0); }\n"
    )
    compiler = sysconfig.get_config_var("CC") or "cc"
    subprocess.run([*compiler.split(), "-pthread", str(source), "-o", "hello"], check=True)
    assert subprocess.run(["./hello"]).returncode == 0


if __name__ == "__main__":
    for part in sys.argv[1:]:
        globals()[part]()
        print(part, flush=True)
