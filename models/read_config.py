"""Hugging Face's config.json, in its older and newer spelling, as a `ModelConfig`. Knows no tensor names.

Older: `torch_dtype`, `rope_theta` with `rope_scaling`. Newer (transformers 5): `dtype`, `rope_parameters`. Both are read for every family.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jaxkv.models.config import DTYPES, Experts, ModelConfig, Rope, check_num_layers, read_count
from jaxkv.models.errors import ModelError
from jaxkv.models.families import WRAPPED, check_supported
from jaxkv.models.read_recurrent import FULL, HYBRIDS, PURE, read_recurrent

# Options that some members of a family use and that we do not compute: what they may say, if they are there at all.
PLAIN: dict[str, Any] = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
GATED = PLAIN | {"attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32"}
REFUSED: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    "llama": PLAIN,
    "mamba": {"hidden_act": "silu"},
    "mamba2": {"hidden_act": "silu", "norm_before_gate": False},
    "mistral": PLAIN,
    "qwen2": PLAIN,
    "qwen3": PLAIN,
    "qwen3_5": GATED,
    "qwen3_5_moe": GATED,
    "qwen3_moe": PLAIN | {"use_sliding_window": False},
    "qwen3_next": GATED,
}
UNBOUNDED = 32_768  # context of a model that has no longest one, unless its config says max_position_embeddings
# What a family's config leaves out where it is what its class in transformers has. Gemma's own files do.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "tie_word_embeddings": True,
    },
    "mamba": {"max_position_embeddings": UNBOUNDED, "tie_word_embeddings": True},
    "mamba2": {"max_position_embeddings": UNBOUNDED},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},  # none at all is written as null
    "qwen3_5": {"partial_rotary_factor": 0.25},
    "qwen3_5_moe": {"partial_rotary_factor": 0.25, "norm_topk_prob": True},
    "qwen3_next": {"partial_rotary_factor": 0.25},
}
OUTER = ("dtype", "torch_dtype", "tie_word_embeddings")  # what such a model's config may say outside its `text_config`
SLIDING = "sliding_attention"
WITH_EXPERTS = ("qwen3_5_moe", "qwen3_moe", "qwen3_next")
NO_ATTENTION: dict[str, Any] = {"num_heads": 0, "num_kv_heads": 0, "head_dim": 0, "ffn_dim": 0, "rope": Rope()}


def read_config(data: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """A ModelConfig from the contents of a config.json; of a model that also sees pictures that of its text part."""
    if data.get("model_type") in WRAPPED:
        outer = {key: data[key] for key in OUTER if key in data}
        data = {**outer, **data.get("text_config", data), "model_type": WRAPPED[data["model_type"]]}
    model_type = str(data.get("model_type"))
    check_supported(model_type, where)
    _refuse_variants(data, where)
    data = {**DEFAULTS.get(model_type, {}), **data}
    count = partial(read_count, data, where)
    experts = _read_experts(data, where) if model_type in WITH_EXPERTS else None
    return ModelConfig(
        model_type=model_type,
        vocab_size=count("vocab_size"),
        num_layers=count("num_hidden_layers"),
        hidden_dim=count("hidden_size"),
        max_position=count("max_position_embeddings"),
        norm_eps=float(data.get("layer_norm_epsilon", 1e-5) if model_type in PURE else data.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(data.get("tie_word_embeddings", False)),
        dtype=_read_dtype(data),
        experts=experts,
        recurrent=read_recurrent(data, where),
        **(NO_ATTENTION if model_type in PURE else _read_attention(data, where, experts)),
    )


def _read_attention(data: Mapping[str, Any], where: str, experts: Experts | None) -> dict[str, Any]:
    """What only models with attention have; they have feed-forward parts, too."""
    count = partial(read_count, data, where)
    num_heads, query_scalar = count("num_attention_heads"), data.get("query_pre_attn_scalar")
    head_dim = count("head_dim", count("hidden_size") // num_heads)
    rope, window_rope = _read_ropes(data, where)
    return {
        "num_heads": num_heads,
        "num_kv_heads": count("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "ffn_dim": 0 if experts and not data.get("intermediate_size") else count("intermediate_size"),
        "rope": rope,
        "windows": _read_windows(data, where),
        "window_rope": window_rope,
        "query_scale": None if query_scalar is None else float(query_scalar) ** -0.5,
        "rotary_dim": int(head_dim * read_part(data)) if data["model_type"] in HYBRIDS else None,
    }


def read_part(data: Mapping[str, Any]) -> float:
    """How much of each head turns with the position."""
    settings = {**(data.get("rope_scaling") or {}), **(data.get("rope_parameters") or {})}
    return float(settings.get("partial_rotary_factor", data.get("partial_rotary_factor", 1.0)))


def read_rope(data: Mapping[str, Any], where: str = "config.json") -> Rope:
    """Rotary settings from `rope_parameters`, or from `rope_theta` and `rope_scaling`."""
    settings = {**(data.get("rope_scaling") or {}), **(data.get("rope_parameters") or {})}
    if (part := read_part(data)) != 1.0 and data.get("model_type") not in HYBRIDS:
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


def _read_ropes(data: Mapping[str, Any], where: str) -> tuple[Rope, Rope | None]:
    """Of the layers that see everything and, where it is another, of those with a window: in Gemma, under `rope_parameters` one for each
    kind of layer, or under `rope_local_base_freq`."""
    nested = data.get("rope_parameters") or {}
    if FULL in nested:
        full, sliding = (read_rope({**data, "rope_parameters": nested[kind]}, where) for kind in (FULL, SLIDING))
        return full, sliding
    local = data.get("rope_local_base_freq")
    return read_rope(data, where), None if local is None else Rope(float(local))


def _read_windows(data: Mapping[str, Any], where: str) -> tuple[int | None, ...]:
    """Per layer the window; nothing where no layer has one. `layer_types` says it, else each family's own rule."""
    count = partial(read_count, data, where)
    num_layers, rule = count("num_hidden_layers"), _slides(data, where)
    check_num_layers(num_layers)
    if rule is None:
        return ()
    kinds = data.get("layer_types") or [SLIDING if rule(layer) else FULL for layer in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= {FULL, SLIDING}:
        raise ModelError(f"{where}: layer_types must say {FULL!r} or {SLIDING!r} for each of {num_layers} layers, got {kinds}")
    if SLIDING not in kinds:
        return ()
    window = count("sliding_window")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _slides(data: Mapping[str, Any], where: str) -> Callable[[int], bool] | None:
    """Which layers have a window where `layer_types` does not say it; None where none has."""
    model_type = data["model_type"]
    if model_type == "mistral" and data.get("sliding_window") is not None:
        return lambda layer: True
    if model_type in ("qwen2", "qwen3") and data.get("use_sliding_window") and data.get("sliding_window") is not None:
        first = data.get("max_window_layers", 28)
        return lambda layer: layer >= first
    if model_type == "gemma3_text":
        pattern = read_count(data, where, "sliding_window_pattern", data.get("_sliding_window_pattern") or 6)
        return lambda layer: (layer + 1) % pattern != 0
    return None


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
        shared_dim=0 if data["model_type"] == "qwen3_moe" else count("shared_expert_intermediate_size"),
    )


def _read_dtype(data: Mapping[str, Any]) -> str:
    dtype = str(data.get("dtype") or data.get("torch_dtype") or "float32").removeprefix("torch.")
    return dtype if dtype in DTYPES else "float32"


def _refuse_variants(data: Mapping[str, Any], where: str) -> None:
    for key, allowed in REFUSED[data["model_type"]].items():
        if data.get(key, allowed) != allowed:
            raise ModelError(f"{where}: {key} = {data[key]!r} is not supported for {data['model_type']!r}, only {allowed!r}")
