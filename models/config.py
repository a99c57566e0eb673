"""What shape a model has: `ModelConfig`, and the reader of Hugging Face's config.json in its older and newer spelling.

Knows no tensor names and imports neither JAX nor Flax.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from jaxkv.models.errors import ModelError
from jaxkv.models.families import check_supported

DTYPES = ("float32", "bfloat16", "float16")
ROPE_KINDS = ("default", "linear", "llama3")


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
class ModelConfig:
    """The numbers a model is built from, the same whatever file format they came from."""

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

    def __post_init__(self) -> None:
        if self.num_layers > MAX_LAYERS:
            raise ModelError(f"model config: {self.num_layers} layers, allowed: at most {MAX_LAYERS}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"model config: {self.num_heads} query heads cannot share {self.num_kv_heads} kv heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"model config: head_dim must be even for rotary embeddings, got {self.head_dim}")
        if self.rope.kind not in ROPE_KINDS:
            raise ModelError(f"model config: rope type {self.rope.kind!r} is not supported; supported are: {', '.join(ROPE_KINDS)}")

    def with_tied(self, tie_embeddings: bool) -> "ModelConfig":
        return replace(self, tie_embeddings=tie_embeddings)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ModelConfig":
        return cls(**{**data, "rope": Rope(**data["rope"])})


def read_config(data: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """A ModelConfig from the contents of a Hugging Face config.json."""

    check_supported(str(data.get("model_type")), where)
    _refuse_variants(data, where)
    count = partial(read_count, data, where)
    num_heads = count("num_attention_heads")
    return ModelConfig(
        model_type=data["model_type"],
        vocab_size=count("vocab_size"),
        num_layers=count("num_hidden_layers"),
        hidden_dim=count("hidden_size"),
        num_heads=num_heads,
        num_kv_heads=count("num_key_value_heads", num_heads),
        head_dim=count("head_dim", count("hidden_size") // num_heads),
        ffn_dim=count("intermediate_size"),
        max_position=count("max_position_embeddings"),
        norm_eps=float(data.get("rms_norm_eps", 1e-6)),
        rope=read_rope(data),
        tie_embeddings=bool(data.get("tie_word_embeddings", False)),
        dtype=_read_dtype(data),
    )


def read_count(data: Mapping[str, Any], where: str, key: str, default: int | None = None) -> int:
    """The positive integer under a key, or the default where the key is absent or null."""
    value = default if data.get(key) is None else data[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{where}: {key} must be a positive integer, got {'nothing' if value is None else repr(value)}")
    if value > MAX_COUNT:
        raise ModelError(f"{where}: {key} is {value}, allowed: at most {MAX_COUNT}")
    return value


def read_rope(data: Mapping[str, Any]) -> Rope:
    """Rotary settings from `rope_parameters`, or from `rope_theta` and `rope_scaling`."""
    settings = {**(data.get("rope_scaling") or {}), **(data.get("rope_parameters") or {})}
    kind = settings.get("rope_type") or settings.get("type") or "default"
    theta = float(settings.get("rope_theta") or data.get("rope_theta") or 10000.0)
    if kind == "default":
        return Rope(theta)
    original = settings.get("original_max_position_embeddings") or data.get("max_position_embeddings") or 8192
    low, high = settings.get("low_freq_factor", 1.0), settings.get("high_freq_factor", 4.0)
    return Rope(theta, kind, float(settings.get("factor", 1.0)), float(low), float(high), int(original))


def read_eos_ids(*configs: Mapping[str, Any]) -> frozenset[int]:
    """The end-of-text ids of config.json and generation_config.json together; each may be absent, a number or a list."""
    found: set[int] = set()
    for data in configs:
        value = data.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if bad := [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or i < 0]:
            raise ModelError(f"eos_token_id: got {bad[0]!r}, allowed: a token id or a list of token ids")
        found.update(ids)
    return frozenset(found)


def _read_dtype(data: Mapping[str, Any]) -> str:
    dtype = str(data.get("dtype") or data.get("torch_dtype") or "float32").removeprefix("torch.")
    return dtype if dtype in DTYPES else "float32"


def _refuse_variants(data: Mapping[str, Any], where: str) -> None:
    """Options that some members of a family use and that we do not compute."""
    for key, allowed in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu"), ("partial_rotary_factor", 1.0)):
        if data.get(key, allowed) != allowed:
            raise ModelError(f"{where}: {key} = {data[key]!r} is not supported for {data['model_type']!r}, only {allowed!r}")
