"""Hugging Face's tensor names, and the parameter each becomes. Knows no files.

Weights are [out, in]; "{}" is the number of the layer.
"""

from collections.abc import Iterable

from jaxkv.models.config import ModelConfig

TOP = {"model.embed_tokens.weight": "embed.table", "model.norm.weight": "norm.scale"}
HEAD = {"lm_head.weight": "head.table"}
PICTURES = ("vision_tower.", "multi_modal_projector.")  # parts of models that also see pictures
IGNORED = ("rotary_emb.inv_freq",)  # buffers that old checkpoints carry and that follow from the config

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
LAYER = {
    "gemma3_text": PLAIN | HEAD_NORM | SANDWICH,
    "llama": PLAIN,
    "mistral": PLAIN,
    "qwen2": PLAIN | BIAS,
    "qwen3": PLAIN | HEAD_NORM,
    "qwen3_moe": PLAIN | HEAD_NORM,
}
ROUTER = {"model.layers.{}.mlp.gate.weight": "layers.{}.mlp.router.weight"}
EXPERT = {
    "model.layers.{}.mlp.experts.{}.gate_proj.weight": "layers.{}.mlp.gate.weight.{}",
    "model.layers.{}.mlp.experts.{}.up_proj.weight": "layers.{}.mlp.up.weight.{}",
    "model.layers.{}.mlp.experts.{}.down_proj.weight": "layers.{}.mlp.down.weight.{}",
}


def tensor_names(config: ModelConfig) -> dict[str, str]:
    """Every tensor name a checkpoint of this config has, and the parameter it becomes.

    A number at the end of a parameter's path is the place in a stack: "layers.0.mlp.up.weight.3" is row 3 of "layers.0.mlp.up.weight".
    """
    names = dict(TOP) if config.tie_embeddings else TOP | HEAD
    for layer in range(config.num_layers):
        names |= {key.format(layer): path.format(layer) for key, path in _layer_names(config, layer).items()}
        if experts := config.experts_of(layer):
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


def _layer_names(config: ModelConfig, layer: int) -> dict[str, str]:
    names = LAYER[config.model_type]
    if config.experts_of(layer) is None:
        return names
    return {key: path for key, path in names.items() if ".mlp." not in path} | ROUTER
