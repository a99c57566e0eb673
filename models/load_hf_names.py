"""Hugging Face's tensor names, and the parameter each becomes. Knows no files.

Weights are [out, in]; "{}" is the number of the layer.
"""

from jaxkv.models.config import ModelConfig

TOP = {"model.embed_tokens.weight": "embed.table", "model.norm.weight": "norm.scale"}
HEAD = {"lm_head.weight": "head.table"}
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
LAYER = {"llama": PLAIN, "qwen2": PLAIN | BIAS, "qwen3": PLAIN | HEAD_NORM}


def tensor_names(config: ModelConfig) -> dict[str, str]:
    """Every tensor name a checkpoint of this config has, and the parameter it becomes."""
    names = TOP if config.tie_embeddings else TOP | HEAD
    layer = LAYER[config.model_type]
    return names | {key.format(i): path.format(i) for i in range(config.num_layers) for key, path in layer.items()}
