"""Converted checkpoints: Orbax arrays named by parameter path, beside a small description and the tokenizer's files.

A folder holds jaxkv.json (config, end-of-text ids, identity of the source), weights/ (Orbax) and, where there is one, draft_head/ (Orbax)
and tokenizer.json with tokenizer_config.json. Arrays have the model's own layout and dtype, so that loading is reading.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv.models.config import ModelConfig
from jaxkv.models.draft_head import draft_config
from jaxkv.models.errors import ModelError
from jaxkv.models.hf_tokenizer import HfTokenizer, read_tokenizer
from jaxkv.models.load_hf import read_json
from jaxkv.models.parameters import (
    OnTensor,
    Stages,
    abstract_model,
    as_parameters,
    build_model,
    check_names,
    numpy_dtype,
    shardings,
    turned,
)
from jaxkv.models.sharding import spread, spread_heads

DESCRIPTION, WEIGHTS, DRAFT_HEAD = "jaxkv.json", "weights", "draft_head"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Description:
    """What jaxkv.json says."""

    config: ModelConfig
    eos_ids: frozenset[int]
    dtype: str  # of the stored weights
    weights_sha256: str  # of the source's weight files
    source_format: str
    weight_dtype: str | None = None  # int8, or None where they are in `dtype`

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self), "config": self.config.to_json(), "eos_ids": sorted(self.eos_ids)}


@dataclass(frozen=True)
class ConvertedFolder:
    """A converted checkpoint before its weights are read."""

    path: Path
    description: Description

    format = "orbax"

    @property
    def config(self) -> ModelConfig:
        return self.description.config

    @property
    def eos_ids(self) -> frozenset[int]:
        return self.description.eos_ids

    @property
    def has_tokenizer(self) -> bool:
        return (self.path / "tokenizer.json").exists()

    @property
    def weights_bytes(self) -> int:
        return sum(file.stat().st_size for file in (self.path / WEIGHTS).rglob("*") if file.is_file())

    @property
    def weight_dtype(self) -> str | None:
        return self.description.weight_dtype

    @property
    def draft_config(self) -> ModelConfig | None:
        """The numbers of the draft head; None where the source had none."""
        return draft_config(self.config) if (self.path / DRAFT_HEAD).is_dir() else None

    def check(self) -> None:
        for config, folder in ((self.config, WEIGHTS), (self.draft_config, DRAFT_HEAD)):
            if config is not None:
                check_names(self._variables(config), _guarded(self.path / folder, _names), str(self.path / folder))

    def load(self, dtype: str, mesh: Mesh, stages: Stages, on_tensor: OnTensor | None = None, weight_dtype: str | None = None) -> Any:
        return self._load(WEIGHTS, self.config, dtype, mesh, stages, weight_dtype)

    def load_draft_head(self, dtype: str, mesh: Mesh, weight_dtype: str | None = None) -> Any:
        """The draft head as a module of its own."""
        config = self.draft_config
        assert config is not None
        return self._load(DRAFT_HEAD, config, dtype, mesh, Stages(), weight_dtype)

    def _load(self, name: str, config: ModelConfig, dtype: str, mesh: Mesh, stages: Stages, weight_dtype: str | None) -> Any:
        """A module, its arrays restored straight to where they belong as far as they are stored that way."""
        made = spread(config, mesh.size)
        wanted, stored = shardings(made, dtype, mesh, weight_dtype), self._variables(config)
        asked = {path: target for path, target in wanted.items() if path in stored and _fits(stored[path], target)}
        others = [path for path in stored if path not in asked]
        with stages.measure("read"):
            whole = {path: _as_stored(stored[path], dtype, mesh) for path in others}
            arrays = _guarded(self.path / name, lambda ocp, folder: ocp.load(folder, asked | whole))
            jax.block_until_ready(arrays)
        with stages.measure("convert"):
            for path in others:
                parameters = as_parameters(*_as_read(config, path, np.asarray(arrays.pop(path)), mesh), wanted, dtype)
                arrays |= {name: jax.device_put(array.copy(), wanted[name].sharding) for name, array in parameters.items()}
        return build_model(made, dtype, arrays, weight_dtype)

    def _variables(self, config: ModelConfig) -> dict[str, Any]:
        """The parameters as they are stored, by path."""
        return abstract_model(config, self.description.dtype, self.description.weight_dtype)[1]

    def tokenizer(self) -> HfTokenizer | None:
        return read_tokenizer(self.path)

    def weights_sha256(self, dtype: str) -> str:
        """The source's, as long as these weights in `dtype` are bit for bit what the source in `dtype` gives."""
        stored, kept = self.description.dtype, ("float32", self.config.dtype)  # those that lose nothing of the source
        if dtype == stored or (stored in kept and (self.weight_dtype is None or dtype in kept)):
            return self.description.weights_sha256
        return hashlib.sha256(f"{self.description.weights_sha256} through {stored}".encode()).hexdigest()


def open_converted(path: Path) -> ConvertedFolder:
    """Read the description of a converted checkpoint."""
    data = read_json(path / DESCRIPTION)
    if data.pop("format", None) != FORMAT:
        raise ModelError(f"{path / DESCRIPTION} is not of format {FORMAT}, the one this version reads; convert the original again")
    try:
        fields = {**data, "config": ModelConfig.from_json(data["config"]), "eos_ids": frozenset(data["eos_ids"])}
        return ConvertedFolder(path, Description(**fields))
    except (KeyError, TypeError) as error:
        raise ModelError(f"{path / DESCRIPTION} is damaged ({error}); convert the original again") from error


def write_converted(
    path: Path,
    description: Description,
    arrays: Mapping[str, jax.Array],
    tokenizer: HfTokenizer | None,
    draft_head: Mapping[str, jax.Array] | None = None,
) -> None:
    """Write a converted checkpoint; the folder appears under its name only when it is whole."""
    from orbax.checkpoint import v1 as ocp

    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp").absolute()
    context = ocp.Context()
    context.array.saving.use_compression = False  # SmolLM2's 538 MB would shrink to 316, but load 30 % slower
    try:
        draft.mkdir(parents=True)
        with context:
            ocp.save(draft / WEIGHTS, dict(arrays))
            if draft_head is not None:
                ocp.save(draft / DRAFT_HEAD, dict(draft_head))
        if tokenizer is not None:
            tokenizer.save(draft)
        (draft / DESCRIPTION).write_text(json.dumps(description.to_json(), indent=1), encoding="utf-8")
        draft.rename(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be written: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _names(ocp: Any, folder: Path) -> dict[str, Any]:
    """What a folder of arrays holds, by path."""
    found: dict[str, Any] = ocp.metadata(folder).metadata
    return found


def _as_read(config: ModelConfig, path: str, array: np.ndarray, mesh: Mesh) -> tuple[str, np.ndarray]:
    """A stored parameter as place_tensors has it from other formats: [out, in], with every kv head that the mesh asks for."""
    if path.endswith(".kernel"):
        path, array = turned(path), array.swapaxes(-1, -2)
    return path, spread_heads(config, mesh.size, path, array)


def _fits(stored: Any, target: jax.ShapeDtypeStruct) -> bool:
    """Whether a parameter can be read straight to its place: not for a dtype of the other layout, more kv heads, or int8 from others."""
    return bool(stored.shape == target.shape and (stored.dtype == jnp.int8) == (target.dtype == jnp.int8))


def _as_stored(stored: Any, dtype: str, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """A parameter on every device, to be worked on; int8 and the scales that belong to it as they are."""
    exact = stored.dtype in (jnp.int8, jnp.float32)
    return jax.ShapeDtypeStruct(stored.shape, stored.dtype if exact else numpy_dtype(dtype), sharding=NamedSharding(mesh, PartitionSpec()))


def _guarded(folder: Path, read: Callable[[Any, Path], Any]) -> Any:
    """Orbax's answer, or a ModelError that names the folder. The import is here because it takes a while and only this format needs it."""
    from orbax.checkpoint import v1 as ocp

    try:
        return read(ocp, folder.absolute())
    except Exception as error:  # Orbax and TensorStore raise many kinds for a missing or damaged file
        raise ModelError(f"{folder} cannot be read: {error}; convert the original again") from error
