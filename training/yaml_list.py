"""A list of parameters in YAML, as people write it: `1e-3` is a number, as YAML 1.2 says.

PyYAML, which is of YAML 1.1, takes numbers without a point or without a sign in the exponent for text, and a trainer
would get its learning rate as `"1e-3"`.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")


def load(text: str) -> Any:
    """What `text` says, or what `yaml.safe_load` raises; ImportError without PyYAML."""
    import yaml

    return yaml.load(text, Loader=_loader())


@cache
def _loader() -> Any:
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    loader: Any = type("ListLoader", (base,), {})
    loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    return loader
