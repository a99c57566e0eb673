"""A JAX trace of an engine at work, with a name for every part of its steps. For TensorBoard, XProf or Perfetto."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from jaxkv.errors import ConfigError

if TYPE_CHECKING:
    from jaxkv.engine import Engine

logger = logging.getLogger("jaxkv")


def check_folder(folder: str | Path) -> Path:
    """The folder, made if need be; raises ConfigError where that cannot be, before anything has run."""
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be a folder for a profile: {error.strerror}") from error
    return path


@contextmanager
def profiled(engine: "Engine", folder: str | Path) -> Iterator[None]:
    """Trace what the engine does while open; the trace is written at the end, below folder/plugins/profile.

    Python's own calls are left out, since they would fill the trace. One trace at a time; a trace grows by some megabytes a minute, so
    profile a short run. Raises ConfigError for a folder that cannot be, RuntimeError where another trace is running.
    """
    path = check_folder(folder)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(str(path), profiler_options=options)
    engine.phases.on = True
    try:
        yield
    finally:
        engine.phases.on = False
        try:
            jax.profiler.stop_trace()
        except Exception as error:  # what was traced is worth more than its trace
            logger.warning("the profile was not written to %s: %s", path, error)
