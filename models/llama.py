"""The Llama family (`model_type` llama): SmolLM2, Llama 2 and 3, TinyLlama. Knows no cache and no checkpoint.

Between embedding and final norm the stream is [m, t] or [t, m], as the layers like it for the dtype; heads are always [t, n, d].
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxkv.models.config import ModelConfig
from jaxkv.models.interface import Attend
from jaxkv.models.layers import (
    Embedding,
    GatedMLP,
    Linear,
    RMSNorm,
    as_rows,
    join_heads,
    rope_angles,
    rope_frequencies,
    rotate,
    split_heads,
    stream_axis,
)
from jaxkv.models.sharding import Side, by_rule

# Layer name ending -> the side of its weight that is split over the mesh's "tensor" axis. What is not listed is replicated.
SPLIT: dict[str, Side] = {
    "attn.q": "out",
    "attn.k": "out",
    "attn.v": "out",
    "attn.o": "in",
    "mlp.gate": "out",
    "mlp.up": "out",
    "mlp.down": "in",
    "embed": "out",
    "head": "out",
}


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; query head i reads kv head i // (h / k)."""

    def __init__(self, config: ModelConfig, layer: int, dtype: jnp.dtype):
        m, h, k, d = config.hidden_dim, config.num_heads, config.num_kv_heads, config.head_dim
        self.layer, self.head_dim = layer, d
        self.q = Linear(m, h * d, dtype)
        self.k = Linear(m, k * d, dtype)
        self.v = Linear(m, k * d, dtype)
        self.o = Linear(h * d, m, dtype)

    def __call__(self, x: Float[Array, "..."], angles: tuple[Array, Array], cache: Any, attend: Attend) -> tuple[Float[Array, "..."], Any]:
        d = self.head_dim
        q = rotate(split_heads(self.q(x), d), *angles)
        k = rotate(split_heads(self.k(x), d), *angles)
        v = split_heads(self.v(x), d)
        out, cache = attend(self.layer, q, k, v, cache, scale=d**-0.5)
        return self.o(join_heads(out.astype(x.dtype))), cache


class Block(nnx.Module):
    """One decoder layer: x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, config: ModelConfig, layer: int, dtype: jnp.dtype):
        self.attn_norm = RMSNorm(config.hidden_dim, config.norm_eps, dtype, stream_axis(dtype))
        self.attn = Attention(config, layer, dtype)
        self.mlp_norm = RMSNorm(config.hidden_dim, config.norm_eps, dtype, stream_axis(dtype))
        self.mlp = GatedMLP(config.hidden_dim, config.ffn_dim, dtype)

    def __call__(self, x: Float[Array, "..."], angles: tuple[Array, Array], cache: Any, attend: Attend) -> tuple[Float[Array, "..."], Any]:
        mixed, cache = self.attn(self.attn_norm(x), angles, cache, attend)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), cache


class Llama(nnx.Module):
    """Decoder-only transformer (https://arxiv.org/abs/2307.09288)."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_dim, dtype)
        self.layers = nnx.List([Block(config, layer, dtype) for layer in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_dim, config.norm_eps, dtype, stream_axis(dtype))
        if not config.tie_embeddings:
            self.head = Embedding(config.vocab_size, config.hidden_dim, dtype)

    def __call__(
        self, tokens: Int[Array, " t"], positions: Int[Array, " t"], cache: Any, attend: Attend
    ) -> tuple[Float[Array, "t m"], Any]:
        """Hidden states after the final norm, and the cache with these tokens' keys and values added by `attend`."""
        x = self.embed(tokens)
        angles = rope_angles(positions, rope_frequencies(self.config.rope, self.config.head_dim))
        for block in self.layers:
            x, cache = block(x, angles, cache, attend)
        return as_rows(self.norm(x)), cache

    def logits(self, hidden: Float[Array, "t m"]) -> Float[Array, "t v"]:
        """Float32 logits of hidden states that __call__ returned."""
        head = self.embed if self.config.tie_embeddings else self.head
        return head.logits(hidden)

    @staticmethod
    def move_keys(config: ModelConfig, keys: Float[Array, "t n d"], num_positions: Int[Array, ""]) -> Float[Array, "t n d"]:
        """Keys as attention stores them, as they would be so many positions further on (below zero: back)."""
        distances = jnp.broadcast_to(num_positions, keys.shape[:1])
        return rotate(keys, *rope_angles(distances, rope_frequencies(config.rope, config.head_dim)))

    @staticmethod
    def partition(path: str, shape: tuple[int, ...], num_shards: int) -> PartitionSpec:
        """How the parameter `path` (for example "layers.0.attn.q.weight") is split over the mesh's axis "tensor"."""
        return by_rule(SPLIT, path, shape, num_shards)
