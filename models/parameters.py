"""From named tensors to a placed model: the step every loader shares. Knows no file format and no checkpoint key."""

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxkv.models.config import DTYPES, ModelConfig
from jaxkv.models.errors import ModelError
from jaxkv.models.families import model_class
from jaxkv.models.int8 import narrow, quantised, scale_path
from jaxkv.models.sharding import spread, spread_heads

OnStage = Callable[[str, float], None]
OnTensor = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One checkpoint tensor on its way to the parameter `path`; nothing is read before `read` is called."""

    path: str  # for example "layers.0.attn.q.weight", [out, in] as in every checkpoint
    key: str  # its name in the checkpoint, for messages
    shape: tuple[int, ...]  # as the parameter has it
    read: Callable[[], Any]
    convert: Callable[[Any], np.ndarray]  # from what `read` returned to our layout, any float dtype


@dataclass(slots=True)
class Stages:
    """Seconds spent per named stage, handed to a listener at the end."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def report(self, on_stage: OnStage | None) -> None:
        for name, seconds in self.seconds.items():
            if on_stage is not None:
                on_stage(name, seconds)


def numpy_dtype(name: str) -> jnp.dtype:
    """The dtype of a name, or an error that lists the names."""
    if name not in DTYPES:
        raise ModelError(f"model.dtype = {name!r} is not supported; use one of {', '.join(DTYPES)}")
    return jnp.dtype(name)


@lru_cache(maxsize=4)
def abstract_model(config: ModelConfig, dtype: str, weight_dtype: str | None = None) -> tuple[Any, dict[str, Any]]:
    """The graph definition of a model and its parameters' variables by path, without any memory for them. `weight_dtype` is None for the
    model's own or int8 (int8.py)."""
    family, jax_dtype = model_class(config.model_type), numpy_dtype(dtype)

    def make() -> nnx.Module:
        model: nnx.Module = family(config, jax_dtype)
        if weight_dtype == "int8":
            narrow(model)
        return model

    graphdef, state = nnx.split(nnx.eval_shape(make))
    return graphdef, {_dotted(path): variable for path, variable in nnx.to_flat_state(state)}


def shardings(config: ModelConfig, dtype: str, mesh: Mesh, weight_dtype: str | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Every parameter's shape, dtype and sharding on this mesh, by path."""
    family, (_, variables) = model_class(config.model_type), abstract_model(config, dtype, weight_dtype)
    specs = {path: family.partition(path, variable.shape, mesh.size) for path, variable in variables.items()}
    return {
        path: jax.ShapeDtypeStruct(variable.shape, variable.dtype, sharding=NamedSharding(mesh, specs[path]))
        for path, variable in variables.items()
    }


def build_model(config: ModelConfig, dtype: str, arrays: Mapping[str, jax.Array], weight_dtype: str | None = None) -> Any:
    """The module with these arrays as its parameters."""
    graphdef, variables = abstract_model(config, dtype, weight_dtype)
    assert arrays.keys() == variables.keys()
    return nnx.merge(graphdef, nnx.from_flat_state([(_split(path), v.replace(arrays[path])) for path, v in variables.items()]))


def flat_parameters(state: nnx.State) -> dict[str, jax.Array]:
    """A model's arrays by path."""
    return {_dotted(path): variable[...] for path, variable in nnx.to_flat_state(state)}


def check_shapes(config: ModelConfig, tensors: Sequence[Tensor], where: str) -> None:
    """Refuse a checkpoint whose tensors do not have the shapes its config asks for."""
    _, variables = abstract_model(config, "float32")
    assert {tensor.path for tensor in tensors} == variables.keys()
    for tensor in tensors:
        if tensor.shape != variables[tensor.path].shape:
            raise ModelError(f"{where}: tensor {tensor.key!r} gives {tensor.shape}, the config asks for {variables[tensor.path].shape}")


def place_tensors(
    config: ModelConfig,
    dtype: str,
    mesh: Mesh,
    tensors: Sequence[Tensor],
    stages: Stages,
    on_tensor: OnTensor | None = None,
    weight_dtype: str | None = None,
) -> Any:
    """Read, convert and place one tensor at a time, so that the peak is the model plus its largest tensor."""
    made = spread(config, mesh.size)
    wanted = shardings(made, dtype, mesh, weight_dtype)
    arrays: dict[str, jax.Array] = {}
    for i, tensor in enumerate(tensors):
        with stages.measure("read"):
            raw = tensor.read()
        with stages.measure("convert"):
            parameters = as_parameters(tensor.path, spread_heads(config, mesh.size, tensor.path, tensor.convert(raw)), wanted, dtype)
        with stages.measure("place"):
            arrays |= {path: jax.device_put(array, wanted[path].sharding) for path, array in parameters.items()}
        if on_tensor is not None:
            on_tensor(i + 1, len(tensors))
    with stages.measure("place"):
        jax.block_until_ready(arrays)
    return build_model(made, dtype, arrays, weight_dtype)


def as_parameters(path: str, array: np.ndarray, wanted: Mapping[str, jax.ShapeDtypeStruct], dtype: str) -> dict[str, np.ndarray]:
    """A tensor as a checkpoint has it, [out, in], as the parameter it becomes: the other way round where the layers like it so, and in int8
    with another one for its scales. What the model would have in `dtype` is what is stored in int8, so the way to there does not matter."""
    made = {}
    here = path if path in wanted else turned(path)
    if wanted[here].dtype == jnp.int8 and array.dtype != jnp.int8:
        array, made[scale_path(here)] = quantised(array.astype(jnp.dtype(dtype)))
    made[here] = array if here == path else array.swapaxes(-1, -2)
    return {name: np.ascontiguousarray(x.astype(wanted[name].dtype, copy=False)) for name, x in made.items()}


def turned(path: str) -> str:
    """The name of the same product's parameter the other way round: `weight` [out, in] and `kernel` [in, out]."""
    layer, _, kind = path.rpartition(".")
    return f"{layer}.{({'weight': 'kernel', 'kernel': 'weight'})[kind]}"


def check_names(expected: Collection[str], found: Collection[str], where: str) -> None:
    """Refuse a checkpoint with tensors missing or left over, listing them."""
    missing, left_over = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or left_over:
        parts = [f"{len(names)} {what}: {_some(names)}" for names, what in ((missing, "missing"), (left_over, "left over")) if names]
        raise ModelError(f"{where}: the tensors do not fit the model; {'; '.join(parts)}")


def hash_files(paths: Sequence[Path]) -> str:
    """SHA-256 over the bytes of these files, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _some(names: Sequence[str], limit: int = 20) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _split(path: str) -> tuple[Any, ...]:
    return tuple(int(part) if part.isdigit() else part for part in path.split("."))
