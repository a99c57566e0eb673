"""Converted checkpoints: Orbax arrays named by parameter path, beside a small description and the tokenizer's files.

A folder holds jaxkv.json (config, end-of-text ids, identity of the source), weights/ (Orbax) and, where there is one, tokenizer.json with
tokenizer_config.json. Arrays have the model's own layout and dtype, so that loading is reading.
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
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv.models.config import ModelConfig
from jaxkv.models.errors import ModelError
from jaxkv.models.hf_tokenizer import HfTokenizer, read_tokenizer
from jaxkv.models.load_hf import read_json
from jaxkv.models.parameters import OnTensor, Stages, abstract_model, build_model, check_names, shardings, turned

DESCRIPTION, WEIGHTS = "jaxkv.json", "weights"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Description:
    """What jaxkv.json says."""

    config: ModelConfig
    eos_ids: frozenset[int]
    dtype: str  # of the stored weights
    weights_sha256: str  # of the source's weight files
    source_format: str

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

    def check(self) -> None:
        check_names(abstract_model(self.config, self.description.dtype)[1], self._stored(), str(self.path / WEIGHTS))

    def load(self, dtype: str, mesh: Mesh, stages: Stages, on_tensor: OnTensor | None = None) -> Any:
        """The model, its arrays restored straight to where they belong."""
        wanted = shardings(self.config, dtype, mesh)
        stored = set(abstract_model(self.config, self.description.dtype)[1])
        asked = {path: target for path, target in wanted.items() if path in stored}
        other_way = {
            turned(path): target for path, target in wanted.items() if path not in stored
        }  # stored for a dtype of the other layout
        asked |= {
            path: jax.ShapeDtypeStruct(
                (*target.shape[:-2], *target.shape[:-3:-1]), target.dtype, sharding=NamedSharding(mesh, PartitionSpec())
            )
            for path, target in other_way.items()
        }
        with stages.measure("read"):
            arrays = _guarded(self.path / WEIGHTS, lambda ocp, folder: ocp.load(folder, asked))
            jax.block_until_ready(arrays)
        with stages.measure("convert"):
            for path, target in other_way.items():
                arrays[turned(path)] = jax.device_put(np.asarray(arrays.pop(path)).swapaxes(-1, -2).copy(), target.sharding)
        return build_model(self.config, dtype, arrays)

    def tokenizer(self) -> HfTokenizer | None:
        return read_tokenizer(self.path)

    def weights_sha256(self, dtype: str) -> str:
        """The source's, as long as these weights in `dtype` are bit for bit what the source in `dtype` gives."""
        stored = self.description.dtype
        if dtype == stored or stored in ("float32", self.config.dtype):
            return self.description.weights_sha256
        return hashlib.sha256(f"{self.description.weights_sha256} through {stored}".encode()).hexdigest()

    def _stored(self) -> dict[str, Any]:
        return _guarded(self.path / WEIGHTS, lambda ocp, folder: ocp.metadata(folder).metadata)


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


def write_converted(path: Path, description: Description, arrays: Mapping[str, jax.Array], tokenizer: HfTokenizer | None) -> None:
    """Write a converted checkpoint; the folder appears under its name only when it is whole."""
    from orbax.checkpoint import v1 as ocp

    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp").absolute()
    context = ocp.Context()
    context.array.saving.use_compression = False  # SmolLM2's 538 MB would shrink to 316, but load 30 % slower
    try:
        draft.mkdir(parents=True)
        with context:
            ocp.save(draft / WEIGHTS, dict(arrays))
        if tokenizer is not None:
            tokenizer.save(draft)
        (draft / DESCRIPTION).write_text(json.dumps(description.to_json(), indent=1), encoding="utf-8")
        draft.rename(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be written: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _guarded(folder: Path, read: Callable[[Any, Path], Any]) -> Any:
    """Orbax's answer, or a ModelError that names the folder. The import is here because it takes a while and only this format needs it."""
    from orbax.checkpoint import v1 as ocp

    try:
        return read(ocp, folder.absolute())
    except Exception as error:  # Orbax and TensorStore raise many kinds for a missing or damaged file
        raise ModelError(f"{folder} cannot be read: {error}; convert the original again") from error
