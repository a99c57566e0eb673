"""What a compiled program depends on, as a key: its recipe, our own sources, versions, flags and the machine. Knows no file of programs.

A key must change whenever the program might. So whatever is met here and not known by heart raises `Unknown`, and there is no key: the
program is then compiled as if nothing was kept.
"""

import dataclasses
import functools
import hashlib
import os
import platform
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import FunctionType
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxkv
import jaxkv.models
from jaxkv.processor import cpu_identity

LOADED_S = time.time()  # our code is that of the files as they were then
_PACKAGES = ("jax", "jaxlib", "flax", "numpy")
_ENVIRONMENT = ("XLA_", "TF_", "NPROC", "OMP_", "LIBTPU_", "CUDA_", "NVIDIA_")
_REPR_TELLS_ALL = (bool, int, float, complex, str, bytes, np.dtype, PartitionSpec, nnx.GraphDef, type(jax.tree.structure(0)))


class Unknown(Exception):
    """Something that a key cannot be made of."""


def digest(*parts: str) -> str:
    """SHA-256 over texts, each with its length, so that no two lists of texts give the same bytes."""
    made = hashlib.sha256()
    for part in parts:
        data = part.encode()
        made.update(len(data).to_bytes(8, "little") + data)
    return made.hexdigest()


def machine_facts(mesh: Mesh) -> str:
    """All that a compiler looks at beside the program: versions, flags, devices and processors."""
    device = mesh.devices.flat[0]
    options = {name: value for name, value in jax.config.values.items() if "cache" not in name}
    return repr(
        {
            "versions": {name: version(name) for name in _PACKAGES},
            "python": platform.python_version(),
            "platform": (device.platform, device.device_kind, device.client.platform_version),
            "mesh": tell(mesh),
            "cpu": (cpu_identity(), os.cpu_count(), _num_usable_cpus()),
            "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_ENVIRONMENT)},
            "options": {name: options[name] for name in sorted(options)},
        }
    )


def source_facts() -> str:
    """A hash of every source file of ours. Raises Unknown where a file is newer than the code in memory, as while somebody works on it."""
    made = hashlib.sha256()
    for path in source_files():
        try:
            data, changed_s = path.read_bytes(), path.stat().st_mtime
        except OSError as error:
            raise Unknown(str(error)) from error
        if changed_s > LOADED_S - 2:
            raise Unknown(f"{path} was changed after it was loaded")
        made.update(f"{path.name} {len(data)} ".encode() + data)
    return made.hexdigest()


def source_files() -> Iterator[Path]:
    """The engine's own and the models', in a fixed order."""
    for package in (jaxkv, jaxkv.models):
        assert package.__file__ is not None
        yield from sorted(Path(package.__file__).parent.rglob("*.py"))


def tell(value: Any) -> str:
    """Everything that a value holds, functions with what they close over included, as a text that is the same in every process."""
    if value is None or isinstance(value, _REPR_TELLS_ALL):
        return _named(value, repr(value))
    if isinstance(value, np.ndarray | np.generic):
        return _named(value, value.dtype.str, str(value.shape), hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest())
    if isinstance(value, jax.ShapeDtypeStruct):
        return _named(value, str(value.dtype), str(value.shape), tell(value.sharding))
    if isinstance(value, Mesh):
        return _mesh(value)
    if isinstance(value, NamedSharding):
        return _named(value, _mesh(value.mesh), repr(value.spec), str(value.memory_kind))
    if isinstance(value, functools.partial):
        return _named(value, tell(value.func), tell(value.args), tell(value.keywords))
    if isinstance(value, FunctionType):
        return _function(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return _container(value)


def _container(value: Any) -> str:
    if isinstance(value, tuple | list):
        return _named(value, *map(tell, value))
    if isinstance(value, frozenset | set):
        return _named(value, *sorted(map(tell, value)))
    if isinstance(value, dict):
        return _named(value, *(f"{tell(key)}: {tell(item)}" for key, item in value.items()))
    if dataclasses.is_dataclass(value):
        return _named(value, *(f"{field.name}: {tell(getattr(value, field.name))}" for field in dataclasses.fields(value)))
    raise Unknown(f"a {type(value).__module__}.{type(value).__qualname__}")


def _function(function: FunctionType) -> str:
    if "<locals>" in function.__qualname__ or function.__module__.startswith("jaxkv"):
        cells = {
            name: tell(cell.cell_contents) for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        }
        return _named(
            function, function.__module__, function.__qualname__, repr(cells), tell(function.__defaults__), tell(function.__kwdefaults__)
        )
    raise Unknown(f"{function.__module__}.{function.__qualname__}, which is none of our functions")


@functools.lru_cache(maxsize=64)
def _mesh(mesh: Any) -> str:
    if not isinstance(mesh, Mesh):
        raise Unknown(f"a {type(mesh).__qualname__} in the place of a mesh")
    return repr((mesh.axis_names, mesh.devices.shape, [(device.platform, device.id) for device in mesh.devices.flat]))


def _named(value: Any, *parts: str) -> str:
    """Type and content. A text with an address in it would be another in every process: that is refused."""
    text = f"{type(value).__module__}.{type(value).__qualname__}({', '.join(parts)})"
    if " at 0x" in text:
        raise Unknown(f"a {type(value).__qualname__} that tells its address")
    return text


def _num_usable_cpus() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
