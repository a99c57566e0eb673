"""From the command to the first token, by stage, each time in a process of its own.

What to expect. A start reads the weights (a file of that size at the disk's or the page cache's speed), converts them (a pass over memory),
places them (another), compiles four programs and runs each once. Everything but compiling is a few passes over the weights; compiling is
seconds, and can be kept. So three starts are compared, in turns:

* cold: a checkpoint as it was downloaded, and an empty compilation cache;
* warm: the same checkpoint, compiled programs from the cache;
* converted: weights as `jaxkv convert` wrote them, compiled programs from the cache.

The aim: a later start at least three times faster than the first. The operating system's own cache of files is warm in all three.
`processor` is the time that all processors spent on a start: on a busy machine the one figure that says something.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Setup, run, say, summary, text, turns

from jaxkv.errors import JaxkvError
from jaxkv.fetch import cache_folder, resolve_model_path
from jaxkv.models import inspect_checkpoint
from jaxkv.models.checkpoint import save_converted

CHILD = "JAXKV_BENCHMARK_STARTED"  # set in the processes that are measured: when their command was given
OPTIONS: dict[str, Any] = {"prompt": 16}


def measure(setup: Setup) -> dict[str, Any]:
    """All figures, by kind of start."""
    config = setup.config()
    source = resolve_model_path(config.model.path, cache_folder(config.run.cache_dir)).resolve()
    info = inspect_checkpoint(source)
    dtype = _dtype(config.model.dtype)
    with tempfile.TemporaryDirectory(prefix="jaxkv-startup-") as scratch:
        folder = Path(scratch)
        starts = {"cold": source, "warm": source}
        if info.format != "orbax":
            starts["converted"] = save_converted(source, folder / "converted", dtype=dtype)
        for path in dict.fromkeys(starts.values()):
            _start(setup, path, folder / "kept")  # fills the cache; not counted
        times: dict[str, list[dict[str, float]]] = {name: [] for name in starts}
        for round_ in range(setup.rounds):
            for name in turns(list(starts), round_):
                xla = folder / ("empty" if name == "cold" else "kept")
                shutil.rmtree(folder / "empty", ignore_errors=True)
                times[name].append(_start(setup, starts[name], xla))
                say(f"  round {round_ + 1}, {name}: {times[name][-1]['total']:.2f} s")
    setup.facts["dtype"] = dtype
    found = {name: _stages(values) for name, values in times.items()}
    for name, stages in found.items():
        say(f"{name}: " + ", ".join(f"{stage} {text(value)}" for stage, value in stages.items()) + " s")
    return {
        "format": info.format,
        "starts_s": found,
        "cold_over": _cold_over(found, "total"),
        "cold_over_processor": _cold_over(found, "processor"),
    }


def _cold_over(found: dict[str, Any], what: str) -> dict[str, float]:
    """How many times faster the later starts are."""
    return {name: round(found["cold"][what]["median"] / stages[what]["median"], 2) for name, stages in found.items() if name != "cold"}


def _start(setup: Setup, model: Path, xla: Path) -> dict[str, float]:
    """Seconds by stage of one start in a fresh process."""
    overrides = [f"--{name}={_word(value)}" for name, value in setup.overrides.items() if name != "model.path"]
    command = [sys.executable, __file__, str(setup.path), *overrides, f"--model.path={model}", f"--prompt={setup.options.prompt}"]
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(xla),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        CHILD: repr(time.monotonic()),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise JaxkvError(f"a start failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _word(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _stages(times: list[dict[str, float]]) -> dict[str, Any]:
    return {stage: summary(one[stage] for one in times) for stage in times[0]}


def _dtype(asked: str) -> str:
    """What `auto` is here, without starting an engine."""
    import jax

    return asked if asked != "auto" else "float32" if jax.default_backend() == "cpu" else "bfloat16"


def child(setup: Setup) -> dict[str, Any]:
    """The process that is measured: start, one short prompt, one token, seconds by stage."""
    from common import endless, random_prompt

    from jaxkv.engine import Engine

    begun = time.perf_counter() - (time.monotonic() - float(os.environ[CHILD]))
    stages = {"python and imports": time.perf_counter() - begun}
    with Engine(setup.config(), on_stage=lambda name, seconds: stages.update({name: seconds})) as engine:
        ready = time.perf_counter()
        engine.submit(random_prompt(engine, setup.options.prompt, 0), endless(1)).result()
        now, processor = time.perf_counter(), time.process_time()
    return {
        **stages,
        "other": ready - begun - sum(stages.values()),
        "first token": now - ready,
        "total": now - begun,
        "processor": processor,
    }


if __name__ == "__main__":
    if CHILD in os.environ:
        from common import read_setup

        print(json.dumps(child(read_setup("startup", "", sys.argv[1:], 1, OPTIONS))))
    else:
        run(__doc__, measure, rounds=3, options=OPTIONS)
