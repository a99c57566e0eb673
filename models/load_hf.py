"""Hugging Face folders: config.json, safetensors (one file or sharded). Their tensor names are in load_hf_names.py."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxkv.models.config import ModelConfig
from jaxkv.models.draft_head import draft_config
from jaxkv.models.errors import ModelError
from jaxkv.models.families import WRAPPED
from jaxkv.models.hf_tokenizer import HfTokenizer, read_tokenizer
from jaxkv.models.load_hf_names import DRAFT_HEAD, HEAD, IGNORED, stack_of, tensor_names, text_names
from jaxkv.models.load_hf_parts import PACKED, Part, tensor_parts
from jaxkv.models.parameters import OnTensor, Stages, Tensor, check_names, check_shapes, hash_files, place_tensors
from jaxkv.models.read_config import read_config, read_eos_ids
from jaxkv.models.read_recurrent import HYBRIDS
from jaxkv.models.safetensors_file import Entry, read_header


@dataclass(frozen=True)
class HfFolder:
    """What a folder says of itself before any weight is read."""

    path: Path
    config: ModelConfig
    eos_ids: frozenset[int]
    files: tuple[Path, ...]
    entries: dict[str, Entry]
    draft_entries: dict[str, Entry]  # of the draft head

    format = "huggingface"
    weight_dtype = None

    @property
    def has_tokenizer(self) -> bool:
        return (self.path / "tokenizer.json").exists()

    @property
    def weights_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    @property
    def draft_config(self) -> ModelConfig | None:
        """The numbers of the draft head; None where there is none."""
        return draft_config(self.config) if self.draft_entries else None

    def check(self) -> None:
        _checked(self.config, self.entries, self.path)

    def load_draft_head(self, dtype: str, mesh: Mesh, weight_dtype: str | None = None) -> Any:
        """The draft head as a module of its own; it needs the model to run."""
        config = self.draft_config
        assert config is not None
        return place_tensors(config, dtype, mesh, _checked(config, self.draft_entries, self.path), Stages(), None, weight_dtype)

    def load(self, dtype: str, mesh: Mesh, stages: Stages, on_tensor: OnTensor | None = None, weight_dtype: str | None = None) -> Any:
        return place_tensors(self.config, dtype, mesh, _checked(self.config, self.entries, self.path), stages, on_tensor, weight_dtype)

    def tokenizer(self) -> HfTokenizer | None:
        return read_tokenizer(self.path)

    def weights_sha256(self, dtype: str) -> str:
        return hash_files(self.files)


def open_hf(path: Path) -> HfFolder:
    """Read config.json, generation_config.json and the safetensors headers of a folder."""
    config_json = read_json(path / "config.json")
    generation = path / "generation_config.json"
    config = read_config(config_json, str(path / "config.json"))
    files = _weight_files(path)
    entries = {name: entry for file in files for name, entry in read_header(file).items() if not name.endswith(IGNORED)}
    if config_json.get("model_type") in WRAPPED:
        entries = {name: entries[key] for key, name in text_names(entries).items()}
    drafts = {name: entry for name, entry in entries.items() if name.startswith(DRAFT_HEAD) and config.model_type in HYBRIDS}
    entries = {name: entry for name, entry in entries.items() if name not in drafts}
    # What is in the file decides whether embeddings are tied, unless the config says outright that they are not.
    has_head = HEAD.keys() <= entries.keys()
    tied = not has_head and config_json.get("tie_word_embeddings") is not False
    eos_ids = read_eos_ids(config_json, config_json.get("text_config") or {}, read_json(generation) if generation.exists() else {})
    return HfFolder(path, config.with_tied(tied), eos_ids, files, entries, drafts)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a ModelError that names the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} must hold a JSON object, got a {type(data).__name__}")
    return data


def _weight_files(path: Path) -> tuple[Path, ...]:
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (path / name).exists()]
        if missing or not names:
            raise ModelError(f"{index} names weight files that are not there: {', '.join(missing) or 'none at all'}")
        return tuple(path / name for name in names)
    if single.exists():
        return (single,)
    raise ModelError(f"{path} has neither model.safetensors nor model.safetensors.index.json (other weight formats are not read)")


def _checked(config: ModelConfig, entries: Mapping[str, Entry], path: Path) -> list[Tensor]:
    """Every parameter's tensor; refuses missing, left-over and misshapen ones."""
    packed = any(key.endswith(PACKED) for key in entries)
    names, parts = tensor_names(config, packed=packed), tensor_parts(config, packed=packed)
    check_names(names.keys() | {part.key for part in parts}, entries, str(path))
    tensors = [*_tensors(names, entries), *(_part(part, entries[part.key]) for part in parts)]
    check_shapes(config, tensors, str(path))
    return tensors


def _tensors(names: Mapping[str, str], entries: Mapping[str, Entry]) -> Iterator[Tensor]:
    """One for every parameter; those of a stack are read together."""
    stacks: dict[str, list[str]] = {}
    for key, path in names.items():
        if whole := stack_of(path):
            stacks.setdefault(whole, []).append(key)
        elif path.endswith(".taps"):
            yield _taps(path, key, entries[key])
        else:
            yield Tensor(path, key, entries[key].shape, entries[key].read, np.asarray)
    for path, keys in stacks.items():
        yield _stacked(path, keys, [entries[key] for key in keys])


def _stacked(path: str, keys: Sequence[str], entries: Sequence[Entry]) -> Tensor:
    """Named after its first row, or after the first whose shape is another."""
    odd = next((i for i, entry in enumerate(entries) if entry.shape != entries[0].shape), 0)
    return Tensor(path, keys[odd], (len(keys), *entries[odd].shape), lambda: np.stack([entry.read() for entry in entries]), np.asarray)


def _part(part: Part, entry: Entry) -> Tensor:
    return Tensor(part.path, part.key, part.shape(entry.shape), entry.read, part.cut)


def _taps(path: str, key: str, entry: Entry) -> Tensor:
    """A convolution's, [channels, 1, taps] in a file."""
    return Tensor(path, key, (entry.shape[-1], *entry.shape[:-2]), entry.read, lambda whole: whole[:, 0].T)
