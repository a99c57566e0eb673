"""What shape a model has: `ModelConfig`, whatever file it was read from.

Knows no file format, no tensor names, and imports neither JAX nor Flax.
"""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any

from jaxkv.models.errors import ModelError

DTYPES = ("float32", "bfloat16", "float16")
ROPE_KINDS = ("default", "linear", "llama3")
RECURRENT_KINDS = ("delta", "mamba", "mamba2")

MAX_COUNT = 2**31 - 1
MAX_LAYERS = 10_000  # a damaged file may say anything, and every layer has names to look for


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: `theta` and how frequencies are stretched for long contexts."""

    theta: float = 10000.0
    kind: str = "default"  # one of ROPE_KINDS
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class Experts:
    """A feed-forward part of many experts, of which each token visits a few."""

    num_experts: int
    num_chosen: int  # experts per token
    ffn_dim: int  # of one expert
    rescale: bool  # whether the weights of the chosen are made to add up to one
    dense_layers: tuple[int, ...] = ()  # those that have one plain feed-forward part instead
    shared_dim: int = 0  # of one more that every token visits, weighted by a gate of its own; 0 where there is none


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Layers that keep a state of fixed size per sequence instead of keys and values per token.

    Every one has a causal convolution over the last `conv_len` inputs, and a sum over all before: per head a matrix, whose one side is the
    head's values and whose other is what they are stored and found under.
    """

    kind: str  # one of RECURRENT_KINDS
    layers: tuple[int, ...]  # which they are
    num_heads: int
    head_dim: int  # values of one head
    num_groups: int  # heads of a group share what they store and find under
    state_dim: int  # the other side of the matrix
    conv_len: int
    step_rank: int = 0  # mamba: through how few numbers a channel's step is computed
    conv_bias: bool = False
    bias: bool = False  # whether the projections into and out of the layer have one

    @property
    def inner_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution. In Mamba it comes before anything is stored or found under exists."""
        return self.inner_dim + (0 if self.kind == "mamba" else 2 * self.num_groups * self.state_dim)

    @property
    def split_dims(self) -> dict[str, int]:
        """What a mesh must divide, in words, and its size."""
        if self.kind == "mamba":
            return {f"{self.inner_dim} channels": self.inner_dim}
        heads = {f"{self.num_heads} recurrent heads": self.num_heads}
        return heads if self.kind == "mamba2" else heads | {f"{self.num_groups} recurrent key heads": self.num_groups}

    @property
    def sum_shape(self) -> tuple[int, ...]:
        """Values come last, where their number is large: [16, 1536] is three times as fast as [1536, 16] on XLA:CPU."""
        return (self.state_dim, self.inner_dim) if self.kind == "mamba" else (self.num_heads, self.state_dim, self.head_dim)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The numbers a model is built from, the same whatever file format they came from.

    What has a default is not said of every model, and is left out of `to_json` where it is the default.
    """

    model_type: str
    vocab_size: int
    num_layers: int
    hidden_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    max_position: int
    norm_eps: float
    rope: Rope
    tie_embeddings: bool
    dtype: str  # as stored in the checkpoint
    experts: Experts | None = None
    windows: tuple[int | None, ...] = ()  # per layer how many tokens it sees, itself included; None is all, () is all in every layer
    window_rope: Rope | None = None  # of the layers with a window, where it is another than `rope`
    query_scale: float | None = None  # what scores are multiplied with, where it is not head_dim**-0.5
    recurrent: Recurrent | None = None  # the layers that keep a state; where all do, what only attention has is 0
    rotary_dim: int | None = None  # how many numbers of a head turn with the position, where it is not all of them

    def __post_init__(self) -> None:
        check_num_layers(self.num_layers)
        if self.page_layers and self.num_heads % self.num_kv_heads:
            raise ModelError(f"model config: {self.num_heads} query heads cannot share {self.num_kv_heads} kv heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"model config: head_dim must be even for rotary embeddings, got {self.head_dim}")
        for rope in (self.rope, self.window_rope or self.rope):
            if rope.kind not in ROPE_KINDS:
                raise ModelError(f"model config: rope type {rope.kind!r} is not supported; supported are: {', '.join(ROPE_KINDS)}")
        if self.experts is not None and self.experts.num_chosen > self.experts.num_experts:
            raise ModelError(f"model config: each token visits {self.experts.num_chosen} of {self.experts.num_experts} experts")

    def with_tied(self, tie_embeddings: bool) -> "ModelConfig":
        return replace(self, tie_embeddings=tie_embeddings)

    def experts_of(self, layer: int) -> Experts | None:
        """The experts of a layer; None where it has one plain feed-forward part."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    def window_of(self, layer: int) -> int | None:
        """How many tokens a layer sees, itself included; None where it sees all."""
        return self.windows[layer] if self.windows else None

    @property
    def window(self) -> int | None:
        """How many tokens the layer sees that sees most; None where one sees all, or none has keys."""
        windows = [self.window_of(layer) for layer in self.page_layers]
        return max((window for window in windows if window is not None), default=None) if None not in windows else None

    def rope_of(self, layer: int) -> Rope:
        """The rotary embedding of a layer."""
        return self.rope if self.window_rope is None or self.window_of(layer) is None else self.window_rope

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The layers that keep a state per sequence."""
        return () if self.recurrent is None else self.recurrent.layers

    @property
    def page_layers(self) -> tuple[int, ...]:
        """The layers that keep keys and values of every token."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.state_layers)

    def place_of(self, layer: int) -> int:
        """Where a layer stands among those that keep the same as it does: 3 of layers (state, state, state, pages) is the first, 0."""
        return (self.state_layers if layer in self.state_layers else self.page_layers).index(layer)

    @property
    def turning_dim(self) -> int:
        """How many numbers of a head turn with the position, the first ones."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def scale(self) -> float:
        """What the products of queries and keys are multiplied with."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    def to_json(self) -> dict[str, Any]:
        plain = {field.name: field.default for field in fields(self) if field.default is not MISSING}
        return {name: value for name, value in asdict(self).items() if name not in plain or getattr(self, name) != plain[name]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ModelConfig":
        parts: dict[str, Any] = {name: Rope(**data[name]) for name in ("rope", "window_rope") if data.get(name)}
        if experts := data.get("experts"):
            parts["experts"] = Experts(**{**experts, "dense_layers": tuple(experts["dense_layers"])})
        if recurrent := data.get("recurrent"):
            parts["recurrent"] = Recurrent(**{**recurrent, "layers": tuple(recurrent["layers"])})
        return cls(**{**data, **parts, "windows": tuple(data.get("windows", ()))})


def check_num_layers(num_layers: int) -> None:
    """Refuse a number that only a damaged file has."""
    if num_layers > MAX_LAYERS:
        raise ModelError(f"model config: {num_layers} layers, allowed: at most {MAX_LAYERS}")


def read_count(data: Mapping[str, Any], where: str, key: str, default: int | None = None) -> int:
    """The positive integer under a key, or the default where the key is absent or null."""
    value = default if data.get(key) is None else data[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{where}: {key} must be a positive integer, got {'nothing' if value is None else repr(value)}")
    if value > MAX_COUNT:
        raise ModelError(f"{where}: {key} is {value}, allowed: at most {MAX_COUNT}")
    return value
