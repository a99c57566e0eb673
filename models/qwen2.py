"""The Qwen2 family (`model_type` qwen2): Qwen2 and Qwen2.5. The plain decoder with biases on queries, keys and values."""

import jax.numpy as jnp

from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Attention, Block, Decoder, Layer
from jaxkv.models.layers import GatedMLP


class Qwen2(Decoder):
    """Decoder-only transformer (https://arxiv.org/abs/2407.10671)."""

    @staticmethod
    def make_block(config: ModelConfig, layer: int, dtype: jnp.dtype) -> Layer:
        attention = Attention(config, layer, dtype, bias=True)
        return Block(config, dtype, attention, GatedMLP(config.hidden_dim, config.ffn_dim, dtype))
