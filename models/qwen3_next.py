"""The Qwen3-Next family (`model_type` qwen3_next): three layers of gated DeltaNet, then one of attention with a gate, and experts in all.

A quarter of each head turns with the position; the norms multiply with one more than their scale, except that of the DeltaNet.
"""

import jax.numpy as jnp

from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Attention, Block, Layer, Stack
from jaxkv.models.delta import DeltaNet
from jaxkv.models.experts import ExpertMLP
from jaxkv.models.layers import GatedMLP


class Qwen3Next(Stack):
    """Decoder-only hybrid of attention and recurrence (https://qwen.ai/blog?id=qwen3-next)."""

    plus_one = True

    @staticmethod
    def make_block(config: ModelConfig, layer: int, dtype: jnp.dtype) -> Layer:
        experts = config.experts_of(layer)
        mlp = GatedMLP(config.hidden_dim, config.ffn_dim, dtype) if experts is None else ExpertMLP(config.hidden_dim, experts, dtype)
        if layer in config.state_layers:
            return Block(config, dtype, DeltaNet(config, layer, dtype), mlp, plus_one=True)
        return Block(config, dtype, Attention(config, layer, dtype, head_norm=True, plus_one=True, gated=True), mlp, plus_one=True)
