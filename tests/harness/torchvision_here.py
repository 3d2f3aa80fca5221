"""torchvision, made importable beside a torch without CUDA: Lightning and transformers import it where they see it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

_LIBRARIES: list[Any] = []  # an operator goes when its Library object does


def torchvision_here() -> Any:
    """torchvision; the test is skipped where there is no torch.

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
