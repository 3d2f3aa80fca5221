"""What several test modules share. Nothing here imports torch before a test asks for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

# What tests share (imds_server, training_runs, …) is imported by its bare name, whichever import mode pytest uses.
if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def torchvision() -> Any:
    """torchvision, made importable beside a torch without CUDA.

    Its wheel is built against CUDA torch; beside a CPU-only one its compiled part does not load and its import fails
    with "operator torchvision::nms does not exist". Defining the two operators that it asks for at import is enough for
    what is tested here: datasets, transforms and ResNets, which use neither.
    """
    torch = pytest.importorskip("torch")
    try:
        import torchvision
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)
        import torchvision
    return torchvision


_LIBRARIES: list[Any] = []  # an operator goes when its Library object does
