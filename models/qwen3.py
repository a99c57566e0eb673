"""The Qwen3 family (`model_type` qwen3). The plain decoder with a norm over each head of queries and keys, before they are turned."""

import jax.numpy as jnp

from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Attention, Block, Decoder, Layer
from jaxkv.models.layers import GatedMLP


class Qwen3(Decoder):
    """Decoder-only transformer (https://arxiv.org/abs/2505.09388)."""

    @staticmethod
    def make_block(config: ModelConfig, layer: int, dtype: jnp.dtype) -> Layer:
        attention = Attention(config, layer, dtype, head_norm=True)
        return Block(config, dtype, attention, GatedMLP(config.hidden_dim, config.ffn_dim, dtype))
