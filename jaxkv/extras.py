"""Which optional packages a command needs, and the one clear line when they are not there. Knows nothing of what they are used for."""

import importlib
from types import ModuleType

from jaxkv.errors import JaxkvError


def require_extra(extra: str, module: str) -> ModuleType:
    """Import `module`, which `pip install 'jaxkv[extra]'` brings; raise JaxkvError that says so where it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # the package is there, something it needs is not
        raise JaxkvError(f"this needs the package {module}, which is not installed: pip install 'jaxkv[{extra}]'") from None
