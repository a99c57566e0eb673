"""Hugging Face's tensor names, and the parameter each becomes. Knows no files, and not the tensors that several parameters lie in.

Weights are [out, in]; "{}" is the number of the layer.
"""

from collections.abc import Iterable

from jaxkv.models.config import ModelConfig

TOP = {"model.embed_tokens.weight": "embed.table", "model.norm.weight": "norm.scale"}
HEAD = {"lm_head.weight": "head.table"}
MAMBA_TOP = {"backbone.embeddings.weight": "embed.table", "backbone.norm_f.weight": "norm.scale"}
PICTURES = ("vision_tower.", "multi_modal_projector.", "visual.")  # parts of models that also see pictures
IGNORED = ("rotary_emb.inv_freq",)  # buffers that old checkpoints carry and that follow from the config
DRAFT_HEAD = "mtp."  # a part of some models that guesses further tokens, with a layer that is named like one of the model
DRAFT_TOP = {
    "mtp.fc.weight": "join.weight",
    "mtp.pre_fc_norm_embedding.weight": "token_norm.scale",
    "mtp.pre_fc_norm_hidden.weight": "hidden_norm.scale",
    "mtp.norm.weight": "norm.scale",
}

PLAIN = {
    "model.layers.{}.input_layernorm.weight": "layers.{}.attn_norm.scale",
    "model.layers.{}.self_attn.q_proj.weight": "layers.{}.attn.q.weight",
    "model.layers.{}.self_attn.k_proj.weight": "layers.{}.attn.k.weight",
    "model.layers.{}.self_attn.v_proj.weight": "layers.{}.attn.v.weight",
    "model.layers.{}.self_attn.o_proj.weight": "layers.{}.attn.o.weight",
    "model.layers.{}.post_attention_layernorm.weight": "layers.{}.mlp_norm.scale",
    "model.layers.{}.mlp.gate_proj.weight": "layers.{}.mlp.gate.weight",
    "model.layers.{}.mlp.up_proj.weight": "layers.{}.mlp.up.weight",
    "model.layers.{}.mlp.down_proj.weight": "layers.{}.mlp.down.weight",
}
BIAS = {
    "model.layers.{}.self_attn.q_proj.bias": "layers.{}.attn.q.bias",
    "model.layers.{}.self_attn.k_proj.bias": "layers.{}.attn.k.bias",
    "model.layers.{}.self_attn.v_proj.bias": "layers.{}.attn.v.bias",
}
HEAD_NORM = {
    "model.layers.{}.self_attn.q_norm.weight": "layers.{}.attn.q_norm.scale",
    "model.layers.{}.self_attn.k_norm.weight": "layers.{}.attn.k_norm.scale",
}
SANDWICH = {
    "model.layers.{}.post_attention_layernorm.weight": "layers.{}.attn_out_norm.scale",
    "model.layers.{}.pre_feedforward_layernorm.weight": "layers.{}.mlp_norm.scale",
    "model.layers.{}.post_feedforward_layernorm.weight": "layers.{}.mlp_out_norm.scale",
}
DELTA = {
    "model.layers.{}.linear_attn.conv1d.weight": "layers.{}.attn.rule.taps",
    "model.layers.{}.linear_attn.A_log": "layers.{}.attn.rule.log_rate",
    "model.layers.{}.linear_attn.dt_bias": "layers.{}.attn.rule.step_bias",
    "model.layers.{}.linear_attn.norm.weight": "layers.{}.attn.norm.scale",
    "model.layers.{}.linear_attn.out_proj.weight": "layers.{}.attn.o.weight",
}
DELTA_APART = {
    "model.layers.{}.linear_attn.in_proj_z.weight": "layers.{}.attn.z.weight",
    "model.layers.{}.linear_attn.in_proj_b.weight": "layers.{}.attn.beta.weight",
    "model.layers.{}.linear_attn.in_proj_a.weight": "layers.{}.attn.step.weight",
}
MAMBA2 = {
    "backbone.layers.{}.norm.weight": "layers.{}.norm.scale",
    "backbone.layers.{}.mixer.conv1d.weight": "layers.{}.mixer.scan.taps",
    "backbone.layers.{}.mixer.A_log": "layers.{}.mixer.scan.log_rate",
    "backbone.layers.{}.mixer.D": "layers.{}.mixer.scan.skip",
    "backbone.layers.{}.mixer.dt_bias": "layers.{}.mixer.scan.step_bias",
    "backbone.layers.{}.mixer.norm.weight": "layers.{}.mixer.scale",
    "backbone.layers.{}.mixer.out_proj.weight": "layers.{}.mixer.o.weight",
}
MAMBA = {key: path for key, path in MAMBA2.items() if not key.endswith(("dt_bias", "mixer.norm.weight"))} | {
    "backbone.layers.{}.mixer.x_proj.weight": "layers.{}.mixer.scan.mix.weight",
    "backbone.layers.{}.mixer.dt_proj.weight": "layers.{}.mixer.scan.step_size.weight",
    "backbone.layers.{}.mixer.dt_proj.bias": "layers.{}.mixer.scan.step_size.bias",
}
CONV_BIAS = {"backbone.layers.{}.mixer.conv1d.bias": "layers.{}.mixer.scan.taps_bias"}
OUT_BIAS = {"backbone.layers.{}.mixer.out_proj.bias": "layers.{}.mixer.o.bias"}
LAYER = {
    "draft_head": PLAIN | HEAD_NORM,
    "gemma3_text": PLAIN | HEAD_NORM | SANDWICH,
    "llama": PLAIN,
    "mamba": MAMBA,
    "mamba2": MAMBA2,
    "mistral": PLAIN,
    "qwen2": PLAIN | BIAS,
    "qwen3": PLAIN | HEAD_NORM,
    "qwen3_5": PLAIN | HEAD_NORM,
    "qwen3_5_moe": PLAIN | HEAD_NORM,
    "qwen3_moe": PLAIN | HEAD_NORM,
    "qwen3_next": PLAIN | HEAD_NORM,
}
ROUTER = {"model.layers.{}.mlp.gate.weight": "layers.{}.mlp.router.weight"}
SHARED = {
    "model.layers.{}.mlp.shared_expert.gate_proj.weight": "layers.{}.mlp.shared.gate.weight",
    "model.layers.{}.mlp.shared_expert.up_proj.weight": "layers.{}.mlp.shared.up.weight",
    "model.layers.{}.mlp.shared_expert.down_proj.weight": "layers.{}.mlp.shared.down.weight",
    "model.layers.{}.mlp.shared_expert_gate.weight": "layers.{}.mlp.shared_gate.weight",
}
PACKED = {"model.layers.{}.mlp.experts.down_proj": "layers.{}.mlp.down.weight"}  # gate and up lie in one tensor
EXPERT = {
    "model.layers.{}.mlp.experts.{}.gate_proj.weight": "layers.{}.mlp.gate.weight.{}",
    "model.layers.{}.mlp.experts.{}.up_proj.weight": "layers.{}.mlp.up.weight.{}",
    "model.layers.{}.mlp.experts.{}.down_proj.weight": "layers.{}.mlp.down.weight.{}",
}


def tensor_names(config: ModelConfig, *, packed: bool = False) -> dict[str, str]:
    """Every tensor name a checkpoint of this config has that is a parameter by itself, and the parameter's path.

    A number at the end of a path is the place in a stack: "layers.0.mlp.up.weight.3" is row 3 of "layers.0.mlp.up.weight". `packed`: the
    experts of a layer are stacked in the file already.
    """
    if config.model_type == "draft_head":
        return DRAFT_TOP | {draft_key(key): path.replace("layers.0.", "layer.") for key, path in _names(config, packed).items()}
    top = MAMBA_TOP if config.model_type in ("mamba", "mamba2") else TOP
    return top | ({} if config.tie_embeddings else HEAD) | _names(config, packed)


def draft_key(key: str) -> str:
    """The name that a tensor of the model's first layer has in the draft head."""
    return key.replace("model.layers.0.", "mtp.layers.0.")


def _names(config: ModelConfig, packed: bool) -> dict[str, str]:
    """Those of all layers."""
    names: dict[str, str] = {}
    for layer in range(config.num_layers):
        names |= {key.format(layer): path.format(layer) for key, path in _layer_names(config, layer, packed).items()}
        if (experts := config.experts_of(layer)) and not packed:
            places = range(experts.num_experts)
            names |= {key.format(layer, place): path.format(layer, place) for key, path in EXPERT.items() for place in places}
    return names


def text_names(names: Iterable[str]) -> dict[str, str]:
    """The tensors of the text part of a model that also sees pictures: name in the file, and its name in a model of text alone.

    Released files say language_model.model.norm.weight, those of transformers 5 model.language_model.norm.weight.
    """
    text = (name for name in names if not name.removeprefix("model.").startswith(PICTURES))
    return {name: name.replace("language_model.model.", "model.").replace("language_model.", "") for name in text}


def stack_of(path: str) -> str | None:
    """The parameter that this path is one row of; None where it is one by itself."""
    whole, _, last = path.rpartition(".")
    return whole if last.isdigit() else None


def _layer_names(config: ModelConfig, layer: int, packed: bool) -> dict[str, str]:
    names, recurrent = LAYER[config.model_type], config.recurrent
    if recurrent is not None and recurrent.kind != "delta":
        return names | (CONV_BIAS if recurrent.conv_bias else {}) | (OUT_BIAS if recurrent.bias else {})
    if layer in config.state_layers:
        apart = {} if config.model_type == "qwen3_next" else DELTA_APART
        names = {key: path for key, path in names.items() if ".attn." not in path} | DELTA | apart
    if (experts := config.experts_of(layer)) is None:
        return names
    names = {key: path for key, path in names.items() if ".mlp." not in path} | ROUTER
    return names | (SHARED if experts.shared_dim else {}) | (PACKED if packed else {})
