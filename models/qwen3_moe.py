"""The Qwen3 family with experts (`model_type` qwen3_moe), as Qwen3-30B-A3B: Qwen3 whose feed-forward parts are mostly many small ones."""

import jax.numpy as jnp

from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Attention, Block, Decoder, Layer
from jaxkv.models.experts import ExpertMLP
from jaxkv.models.layers import GatedMLP


class Qwen3Moe(Decoder):
    """Decoder-only transformer with experts (https://arxiv.org/abs/2505.09388)."""

    @staticmethod
    def make_block(config: ModelConfig, layer: int, dtype: jnp.dtype) -> Layer:
        attention, experts = Attention(config, layer, dtype, head_norm=True), config.experts_of(layer)
        if experts is None:
            return Block(config, dtype, attention, GatedMLP(config.hidden_dim, config.ffn_dim, dtype))
        return Block(config, dtype, attention, ExpertMLP(config.hidden_dim, experts, dtype))
