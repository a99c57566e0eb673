"""The maths and the checkpoints: model families, config readers, loaders, tokenizers. Knows nothing of pages, requests or steps.

Letters of array shapes and einsums, the same everywhere:

    b  rows            t  query tokens     s  cached tokens
    h  query heads     k  kv heads         d  head dim
    m  model dim       f  feed-forward dim v  vocabulary
    l  layers          p  pages            z  page size        e  experts

Names are imported when they are first used: asking for `ModelError` or `ByteTokenizer` brings in no JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxkv.models.checkpoint import Checkpoint as Checkpoint
    from jaxkv.models.checkpoint import CheckpointInfo as CheckpointInfo
    from jaxkv.models.checkpoint import inspect_checkpoint as inspect_checkpoint
    from jaxkv.models.checkpoint import load_checkpoint as load_checkpoint
    from jaxkv.models.checkpoint import load_draft_head as load_draft_head
    from jaxkv.models.checkpoint import load_tokenizer as load_tokenizer
    from jaxkv.models.checkpoint import save_converted as save_converted
    from jaxkv.models.config import ModelConfig as ModelConfig
    from jaxkv.models.dense import dense_attend as dense_attend
    from jaxkv.models.dense import dense_logits as dense_logits
    from jaxkv.models.errors import ModelError as ModelError
    from jaxkv.models.families import FAMILIES as FAMILIES
    from jaxkv.models.interface import Advance as Advance
    from jaxkv.models.interface import Attend as Attend
    from jaxkv.models.interface import LanguageModel as LanguageModel
    from jaxkv.models.interface import Recurrence as Recurrence
    from jaxkv.models.sharding import about_copies as about_copies
    from jaxkv.models.sharding import check_mesh as check_mesh
    from jaxkv.models.sharding import spread as spread
    from jaxkv.models.states import StateShape as StateShape
    from jaxkv.models.states import state_bytes as state_bytes
    from jaxkv.models.states import state_shapes as state_shapes
    from jaxkv.models.tokenizer import ByteTokenizer as ByteTokenizer
    from jaxkv.models.tokenizer import TextStream as TextStream
    from jaxkv.models.tokenizer import Tokenizer as Tokenizer

_HOMES = {
    "checkpoint": (
        "Checkpoint",
        "CheckpointInfo",
        "inspect_checkpoint",
        "load_checkpoint",
        "load_draft_head",
        "load_tokenizer",
        "save_converted",
    ),
    "config": ("ModelConfig",),
    "dense": ("dense_attend", "dense_logits"),
    "errors": ("ModelError",),
    "families": ("FAMILIES",),
    "interface": ("Advance", "Attend", "LanguageModel", "Recurrence"),
    "sharding": ("about_copies", "check_mesh", "spread"),
    "states": ("StateShape", "state_bytes", "state_shapes"),
    "tokenizer": ("ByteTokenizer", "TextStream", "Tokenizer"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
