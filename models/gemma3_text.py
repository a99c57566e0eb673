"""The text family of Gemma 3 (`model_type` gemma3_text).

Five of six layers see a window only, and turn their keys by another frequency; norms stand before and after each part of a layer and
multiply with one more than their scale; the embedding is multiplied with the root of its dim.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Attention, Decoder, Layer, stream_norm
from jaxkv.models.interface import Attend
from jaxkv.models.layers import GatedMLP


class Block(nnx.Module):
    """One layer: x + norm(attention(norm x)), then x + norm(mlp(norm x))."""

    def __init__(self, config: ModelConfig, layer: int, dtype: jnp.dtype):
        self.attn_norm = stream_norm(config, dtype, plus_one=True)
        self.attn = Attention(config, layer, dtype, head_norm=True, plus_one=True)
        self.attn_out_norm = stream_norm(config, dtype, plus_one=True)
        self.mlp_norm = stream_norm(config, dtype, plus_one=True)
        self.mlp = GatedMLP(config.hidden_dim, config.ffn_dim, dtype, activation="gelu_tanh")
        self.mlp_out_norm = stream_norm(config, dtype, plus_one=True)

    def __call__(self, x: Float[Array, "..."], angles: tuple[Array, Array], cache: Any, attend: Attend) -> tuple[Float[Array, "..."], Any]:
        mixed, cache = self.attn(self.attn_norm(x), angles, cache, attend)
        x = x + self.attn_out_norm(mixed)
        return x + self.mlp_out_norm(self.mlp(self.mlp_norm(x))), cache


class Gemma3Text(Decoder):
    """Decoder-only transformer (https://arxiv.org/abs/2503.19786)."""

    plus_one = True

    @staticmethod
    def make_block(config: ModelConfig, layer: int, dtype: jnp.dtype) -> Layer:
        return Block(config, layer, dtype)

    def embedded(self, tokens: Int[Array, " t"]) -> Float[Array, "..."]:
        """The factor is rounded to the dtype first, as in training: in bfloat16 the root of 640 is 25.25."""
        x = self.embed(tokens)
        return x * jnp.asarray(self.config.hidden_dim**0.5, x.dtype)
