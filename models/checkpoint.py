"""Any checkpoint by its path: which format it is, what it holds, load it, convert it. Knows the loaders, none of their names."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxkv.models.config import ModelConfig
from jaxkv.models.errors import ModelError
from jaxkv.models.hf_tokenizer import HfTokenizer
from jaxkv.models.load_gguf import open_gguf
from jaxkv.models.load_hf import HfFolder, open_hf
from jaxkv.models.load_orbax import DESCRIPTION, ConvertedFolder, Description, open_converted, write_converted
from jaxkv.models.parameters import OnStage, Stages, flat_parameters, numpy_dtype
from jaxkv.models.sharding import AXIS, check_mesh

OnProgress = Callable[[int, int], None]  # tensors done, tensors in all


@runtime_checkable
class Opened(Protocol):
    """A checkpoint whose headers have been read, in any format."""

    @property
    def format(self) -> str: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def has_tokenizer(self) -> bool: ...
    @property
    def weights_bytes(self) -> int: ...
    @property
    def weight_dtype(self) -> str | None: ...

    def check(self) -> None:
        """Refuse missing and left-over tensors."""

    def load(self, dtype: str, mesh: Mesh, stages: Stages, on_tensor: OnProgress | None = None, weight_dtype: str | None = None) -> Any: ...
    def tokenizer(self) -> HfTokenizer | None: ...
    def weights_sha256(self, dtype: str) -> str: ...


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What can be said of a checkpoint without reading its weights."""

    path: Path
    format: str  # huggingface, gguf or orbax
    config: ModelConfig
    eos_ids: frozenset[int]
    has_tokenizer: bool
    weights_bytes: int
    weight_dtype: str | None  # int8 where the products' weights are stored so, else None
    opened: Opened = field(repr=False, compare=False)  # so that whoever loads it next need not read the headers again

    @property
    def draft_config(self) -> ModelConfig | None:
        """The numbers of the draft head that it brings; None where there is none."""
        return self.opened.draft_config if isinstance(self.opened, HfFolder | ConvertedFolder) else None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded model with what belongs to it. `weights_sha256` names the weights, wherever they lie and in whichever format."""

    model: Any
    config: ModelConfig
    tokenizer: HfTokenizer | None
    eos_ids: frozenset[int]
    weights_sha256: str


def inspect_checkpoint(path: str | Path) -> CheckpointInfo:
    """Read a checkpoint's headers and check its tensor names; raises ModelError for whatever is wrong with it."""
    opened = _open(Path(path))
    opened.check()
    known = (opened.format, opened.config, opened.eos_ids, opened.has_tokenizer, opened.weights_bytes, opened.weight_dtype)
    return CheckpointInfo(Path(path), *known, opened)


def load_checkpoint(
    source: str | Path | CheckpointInfo,
    *,
    dtype: str,
    mesh: Mesh,
    weight_dtype: str | None = None,
    on_stage: OnStage | None = None,
    on_tensor: OnProgress | None = None,
) -> Checkpoint:
    """Load a model onto a mesh with the axis "tensor", and its tokenizer. `source` is its path, or what `inspect_checkpoint` said of it.

    `weight_dtype` may be int8 for the products' weights (int8.py); None is the model's own, or int8 where they are stored so.
    `on_stage(name, seconds)` hears how long each of open, tokenizer, read, convert, place and hash took, once all are done.
    `on_tensor(done, total)` is called after each tensor of a format that is read tensor by tensor.
    """
    numpy_dtype(dtype)
    stages = Stages()
    with stages.measure("open"):
        opened = _opened(source)
        check_mesh(opened.config, mesh.shape[AXIS])
    with stages.measure("tokenizer"):
        tokenizer = opened.tokenizer()  # before the weights, since it may be refused
    model = opened.load(dtype, mesh, stages, on_tensor, weight_dtype or opened.weight_dtype)
    with stages.measure("hash"):
        sha256 = opened.weights_sha256(dtype)
    stages.report(on_stage)
    return Checkpoint(model, opened.config, tokenizer, opened.eos_ids, sha256)


def load_draft_head(source: str | Path | CheckpointInfo, *, dtype: str, mesh: Mesh, weight_dtype: str | None = None) -> Any:
    """The head that some models bring to guess further tokens, as a module beside the model; ModelError where there is none."""
    numpy_dtype(dtype)
    opened = _opened(source)
    if not isinstance(opened, HfFolder | ConvertedFolder) or opened.draft_config is None:
        raise ModelError(
            f"{source.path if isinstance(source, CheckpointInfo) else source} has no draft head; the Hugging Face folders of qwen3_next, "
            "qwen3_5 and qwen3_5_moe have one where they hold tensors named mtp.*, and so has what they are converted to"
        )
    check_mesh(opened.config, mesh.shape[AXIS])
    return opened.load_draft_head(dtype, mesh, weight_dtype or opened.weight_dtype)


def load_tokenizer(source: str | Path | CheckpointInfo) -> HfTokenizer | None:
    """Only the tokenizer of a checkpoint, None where it has none: for those who must know a prompt's length before weights are loaded."""
    return _opened(source).tokenizer()


def save_converted(
    path_in: str | Path, path_out: str | Path, dtype: str, progress: OnProgress | None = None, weight_dtype: str | None = None
) -> Path:
    """Convert a GGUF file or Hugging Face folder to an Orbax checkpoint in this dtype; the folder appears only when it is whole."""
    numpy_dtype(dtype)
    source, target = _open(Path(path_in)), Path(path_out)
    if source.format == "orbax":
        raise ModelError(f"{path_in} is converted already; give the GGUF file or the Hugging Face folder it was made from")
    if target.exists():
        raise ModelError(f"{target} exists already; remove it or choose another folder")
    tokenizer = source.tokenizer()
    mesh, draft_head = Mesh(np.array(jax.devices()[:1]), (AXIS,)), None
    model = source.load(dtype, mesh, Stages(), progress, weight_dtype)
    if isinstance(source, HfFolder) and source.draft_config is not None:
        draft_head = flat_parameters(nnx.state(source.load_draft_head(dtype, mesh, weight_dtype)))
    description = Description(source.config, source.eos_ids, dtype, source.weights_sha256(dtype), source.format, weight_dtype)
    write_converted(target, description, flat_parameters(nnx.state(model)), tokenizer, draft_head)
    return target


def _opened(source: str | Path | CheckpointInfo) -> Opened:
    """Headers are read once, by whoever comes first."""
    return source.opened if isinstance(source, CheckpointInfo) else _open(Path(source))


def _open(path: Path) -> Opened:
    """Read the headers of whatever lies at this path; a header may hold anything, so what trips over it is the file's fault."""
    try:
        return _open_format(path)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise ModelError(f"{path} is damaged: a header holds a value of the wrong kind ({type(error).__name__}: {error})") from error


def _open_format(path: Path) -> Opened:
    if not path.exists():
        raise ModelError(f"{path} does not exist; model.path takes a folder, a .gguf file or a known name")
    if path.is_file():
        return open_gguf(path)
    if (path / DESCRIPTION).exists():
        return open_converted(path)
    if (path / "config.json").exists():
        return open_hf(path)
    files = sorted(file.name for file in path.glob("*.gguf"))
    hint = f"; point at one of its files: {', '.join(files)}" if files else ""
    raise ModelError(f"{path} is no model folder: it has neither config.json (Hugging Face) nor {DESCRIPTION} (converted){hint}")
