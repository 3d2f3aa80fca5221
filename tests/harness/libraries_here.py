"""Imported by the server that ranks are forked from: the libraries under test, each import of which takes seconds."""

from __future__ import annotations

import contextlib

from torchvision_here import torchvision_here

torchvision_here()
with contextlib.suppress(ImportError):
    import lightning.pytorch  # noqa: F401
with contextlib.suppress(ImportError):
    from transformers import Trainer  # noqa: F401
with contextlib.suppress(ImportError):
    import accelerate  # noqa: F401
