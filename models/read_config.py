"""Hugging Face's config.json, in its older and newer spelling, as a `ModelConfig`. Knows no tensor names.

Older: `torch_dtype`, `rope_theta` with `rope_scaling`. Newer (transformers 5): `dtype`, `rope_parameters`. Both are read for every family.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxkv.models.config import DTYPES, Experts, ModelConfig, Rope, check_num_layers, read_count
from jaxkv.models.errors import ModelError
from jaxkv.models.families import check_supported

# Options that some members of a family use and that we do not compute: what they may say, if they are there at all.
PLAIN: dict[str, Any] = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
REFUSED: dict[str, dict[str, Any]] = {
    "llama": PLAIN,
    "qwen2": PLAIN | {"use_sliding_window": False},
    "qwen3": PLAIN | {"use_sliding_window": False},
    "qwen3_moe": PLAIN | {"use_sliding_window": False},
}


def read_config(data: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """A ModelConfig from the contents of a config.json."""
    model_type = str(data.get("model_type"))
    check_supported(model_type, where)
    _refuse_variants(data, where)
    count = partial(read_count, data, where)
    num_heads = count("num_attention_heads")
    return ModelConfig(
        model_type=model_type,
        vocab_size=count("vocab_size"),
        num_layers=count("num_hidden_layers"),
        hidden_dim=count("hidden_size"),
        num_heads=num_heads,
        num_kv_heads=count("num_key_value_heads", num_heads),
        head_dim=count("head_dim", count("hidden_size") // num_heads),
        ffn_dim=count("intermediate_size"),
        max_position=count("max_position_embeddings"),
        norm_eps=float(data.get("rms_norm_eps", 1e-6)),
        rope=read_rope(data, where),
        tie_embeddings=bool(data.get("tie_word_embeddings", False)),
        dtype=_read_dtype(data),
        experts=_read_experts(data, where) if model_type == "qwen3_moe" else None,
    )


def read_rope(data: Mapping[str, Any], where: str = "config.json") -> Rope:
    """Rotary settings from `rope_parameters`, or from `rope_theta` and `rope_scaling`."""
    settings = {**(data.get("rope_scaling") or {}), **(data.get("rope_parameters") or {})}
    part = settings.get("partial_rotary_factor", data.get("partial_rotary_factor", 1.0))
    if part != 1.0:
        raise ModelError(f"{where}: partial_rotary_factor = {part!r} is not supported for {data.get('model_type')!r}, only 1.0")
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


def _read_experts(data: Mapping[str, Any], where: str) -> Experts:
    """A layer has experts where `mlp_only_layers` does not name it, and of the others every `decoder_sparse_step`-th."""
    count = partial(read_count, data, where)
    num_layers, step = count("num_hidden_layers"), count("decoder_sparse_step", 1)
    check_num_layers(num_layers)
    named = data.get("mlp_only_layers") or []
    return Experts(
        num_experts=count("num_local_experts" if data.get("num_experts") is None else "num_experts"),
        num_chosen=count("num_experts_per_tok"),
        ffn_dim=count("moe_intermediate_size"),
        rescale=bool(data.get("norm_topk_prob", False)),
        dense_layers=tuple(layer for layer in range(num_layers) if layer in named or (layer + 1) % step),
    )


def _read_dtype(data: Mapping[str, Any]) -> str:
    dtype = str(data.get("dtype") or data.get("torch_dtype") or "float32").removeprefix("torch.")
    return dtype if dtype in DTYPES else "float32"


def _refuse_variants(data: Mapping[str, Any], where: str) -> None:
    for key, allowed in REFUSED[data["model_type"]].items():
        if data.get(key, allowed) != allowed:
            raise ModelError(f"{where}: {key} = {data[key]!r} is not supported for {data['model_type']!r}, only {allowed!r}")
