"""An inference engine that parks what does not fit. This file owns the public names and loads none of them before it is asked.

`import jaxkv` and `import jaxkv.scheduler` bring in the standard library only; `jaxkv.Engine` brings in JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxkv.config import Config, load_config
    from jaxkv.constraint import Constraint
    from jaxkv.engine import Engine
    from jaxkv.request import Completion, SamplingParams

__version__ = "0.1.0"

__all__ = ["Completion", "Config", "Constraint", "Engine", "SamplingParams", "__version__", "load_config"]

_HOME = {
    "Completion": "jaxkv.request",
    "Config": "jaxkv.config",
    "Constraint": "jaxkv.constraint",
    "Engine": "jaxkv.engine",
    "SamplingParams": "jaxkv.request",
    "load_config": "jaxkv.config",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module the first time somebody asks for it."""
    if name not in _HOME:
        raise AttributeError(f"module 'jaxkv' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted([*globals(), *_HOME])
