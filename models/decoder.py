"""The decoder that most families are: attention and a feed-forward part in every layer, each behind a norm. Knows no cache, no checkpoint.

A family's own file says how its blocks differ (`make_block`). Between embedding and final norm the stream is [m, t] or [t, m], as the
layers like it for the dtype; heads are always [t, n, d].
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxkv.models.config import ModelConfig
from jaxkv.models.interface import Advance, Attend
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
    "mlp.shared.gate": "out",
    "mlp.shared.up": "out",
    "mlp.shared.down": "in",
    "attn.z": "out",
    "attn.beta": "out",
    "attn.step": "out",
    "mixer.x": "out",
    "mixer.z": "out",
    "mixer.step": "out",
    "mixer.scan.mix": "in",
    "mixer.scan.step_size": "out",
    "mixer.o": "in",
    "embed": "out",
    "head": "out",
}


# x, angles, cache and `attend`; in a layer that keeps a state () and `advance` instead
Layer = Callable[[Array, Any, Any, Any], tuple[Array, Any]]


def stream_norm(config: ModelConfig, dtype: jnp.dtype, *, plus_one: bool = False) -> RMSNorm:
    """A norm over the features of the stream."""
    return RMSNorm(config.hidden_dim, config.norm_eps, dtype, stream_axis(dtype), plus_one=plus_one)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; query head i reads kv head i // (h / k).

    `bias`: q, k and v have one. `head_norm`: each head of q and k is normalised before it is turned (`plus_one`: times 1 + scale). `gated`:
    q is twice as long, of each head first the query, then what the sigmoid of gates the head's output.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        dtype: jnp.dtype,
        *,
        bias: bool = False,
        head_norm: bool = False,
        plus_one: bool = False,
        gated: bool = False,
    ):
        m, h, k, d = config.hidden_dim, config.num_heads, config.num_kv_heads, config.head_dim
        self.place, self.window, self.scale = config.place_of(layer), config.window_of(layer), config.scale
        self.head_dim, self.gated = d, gated
        self.q = Linear(m, (2 if gated else 1) * h * d, dtype, bias=bias)
        self.k = Linear(m, k * d, dtype, bias=bias)
        self.v = Linear(m, k * d, dtype, bias=bias)
        self.o = Linear(h * d, m, dtype)
        self.q_norm = RMSNorm(d, config.norm_eps, dtype, plus_one=plus_one) if head_norm else None
        self.k_norm = RMSNorm(d, config.norm_eps, dtype, plus_one=plus_one) if head_norm else None

    def __call__(self, x: Float[Array, "..."], angles: tuple[Array, Array], cache: Any, attend: Attend) -> tuple[Float[Array, "..."], Any]:
        d = self.head_dim

        def turned(heads: Float[Array, "t n d"], norm: RMSNorm | None) -> Float[Array, "t n d"]:
            return rotate(heads if norm is None else norm(heads), *angles)

        q, gate = split_heads(self.q(x), 2 * d if self.gated else d), None
        if self.gated:
            q, gate = q[..., :d], q[..., d:]
        q, k, v = turned(q, self.q_norm), turned(split_heads(self.k(x), d), self.k_norm), split_heads(self.v(x), d)
        out, cache = attend(self.place, q, k, v, cache, scale=self.scale, window=self.window)
        if gate is not None:
            out = out.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))
        return self.o(join_heads(out.astype(x.dtype))), cache


class Block(nnx.Module):
    """One decoder layer: x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, attention: Layer, mlp: Callable[[Array], Array], *, plus_one: bool = False):
        self.attn_norm = stream_norm(config, dtype, plus_one=plus_one)
        self.attn = attention
        self.mlp_norm = stream_norm(config, dtype, plus_one=plus_one)
        self.mlp = mlp

    def __call__(self, x: Float[Array, "..."], angles: Any, cache: Any, attend: Any) -> tuple[Float[Array, "..."], Any]:
        mixed, cache = self.attn(self.attn_norm(x), angles, cache, attend)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), cache


class Stack(nnx.Module):
    """Embedding, blocks, a last norm, an output head."""

    plus_one = False  # whether the last norm multiplies with one more than its scale

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.embed = Embedding(config.vocab_size, config.hidden_dim, dtype)
        self.layers = nnx.List([self.make_block(config, layer, dtype) for layer in range(config.num_layers)])
        self.norm = stream_norm(config, dtype, plus_one=self.plus_one)
        if not config.tie_embeddings:
            self.head = Embedding(config.vocab_size, config.hidden_dim, dtype)

    @staticmethod
    def make_block(config: ModelConfig, layer: int, dtype: jnp.dtype) -> Layer:
        """The layer with this number: where families differ."""
        return Block(config, dtype, Attention(config, layer, dtype), GatedMLP(config.hidden_dim, config.ffn_dim, dtype))

    def __call__(
        self, tokens: Int[Array, " t"], positions: Int[Array, " t"], cache: Any, attend: Attend, advance: Advance | None = None
    ) -> tuple[Float[Array, "t m"], Any]:
        """Hidden states after the final norm, and the cache with what `attend` and `advance` made of these tokens."""
        config, x = self.config, self.embedded(tokens)
        ropes = {layer: config.rope_of(layer) for layer in config.page_layers}
        angles = {rope: rope_angles(positions, rope_frequencies(rope, config.turning_dim)) for rope in dict.fromkeys(ropes.values())}
        for layer, block in enumerate(self.layers):
            x, cache = block(x, angles[ropes[layer]], cache, attend) if layer in ropes else block(x, (), cache, advance)
        return as_rows(self.norm(x.astype(self.dtype))), cache

    def embedded(self, tokens: Int[Array, " t"]) -> Float[Array, "..."]:
        """The stream as the first layer gets it."""
        return self.embed(tokens)

    def logits(self, hidden: Float[Array, "t m"]) -> Float[Array, "t v"]:
        """Float32 logits of hidden states that __call__ returned."""
        head = self.embed if self.config.tie_embeddings else self.head
        return head.logits(hidden)

    @staticmethod
    def partition(path: str, shape: tuple[int, ...], num_shards: int) -> PartitionSpec:
        """How the parameter `path` (for example "layers.0.attn.q.weight") is split over the mesh's axis "tensor"."""
        return by_rule(SPLIT, path, shape, num_shards)


class Decoder(Stack):
    """A stack whose every layer is attention, with keys that turn with their position and can be moved to another."""

    @staticmethod
    def move_keys(config: ModelConfig, layer: int, keys: Float[Array, "t n d"], num_positions: Int[Array, ""]) -> Float[Array, "t n d"]:
        """A layer's keys as attention stores them, as they would be so many positions further on (below zero: back)."""
        distances = jnp.broadcast_to(num_positions, keys.shape[:1])
        return rotate(keys, *rope_angles(distances, rope_frequencies(config.rope_of(layer), config.turning_dim)))
