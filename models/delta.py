"""Gated DeltaNet (https://arxiv.org/abs/2412.06464): a layer that replaces what its state holds under a key. Knows no family and no cache.

The sum of a head is a matrix S [i, d] that maps keys to values, i being the dim of a key. A token lets all of it fade, looks up what is
held under its key, and puts its own value there as far as `beta` says:

    S <- decay S        S <- S + k beta (v - S^T k)^T        out = S^T q
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxkv.models.config import ModelConfig, Recurrent
from jaxkv.models.interface import Advance
from jaxkv.models.layers import WIDE, Linear, RMSNorm, as_rows, join_heads, ones, split_heads, zeros
from jaxkv.models.recurrent import Recurrence, look_up, rows_of

KEY_EPS = 1e-6


class DeltaRule(Recurrence):
    """The convolution over queries, keys and values, and the matrix of each head; value head j has the queries and keys of j // (h / g)."""

    def __init__(self, made: Recurrent, dtype: jnp.dtype):
        super().__init__(made, dtype)
        self.made = made
        self.log_rate = zeros((made.num_heads,), WIDE)
        self.step_bias = ones(made.num_heads, WIDE)

    def prepare(self, x: Float[Array, "t c"], *rest: Float[Array, "t h"]) -> tuple[Float[Array, "t ..."], ...]:
        beta, step = rest
        t, g, i = x.shape[0], self.made.num_groups, self.made.state_dim
        queries, keys, values = jnp.split(x, [g * i, 2 * g * i], axis=1)

        def heads(y: Array) -> Array:
            y = y.reshape(t, g, i)
            return jnp.repeat(y * jax.lax.rsqrt((y * y).sum(-1, keepdims=True) + KEY_EPS), self.made.num_heads // g, axis=1)

        rate = -jnp.exp(self.log_rate[...])[None] * jax.nn.softplus(step + self.step_bias[...][None])
        values = values.reshape(t, self.made.num_heads, self.made.head_dim)
        return heads(queries) * i**-0.5, heads(keys), values, jax.nn.sigmoid(beta), jnp.exp(rate)

    def turn(self, total: Float[Array, "h i d"], *token: Float[Array, "h ..."]) -> tuple[Float[Array, "h i d"], Float[Array, "h d"]]:
        q, k, v, beta, decay = token
        fade = decay[:, None]
        held, found = look_up(total, k, q)
        put = beta[:, None] * (v - held * fade)
        total = total * fade[:, :, None] + k[:, :, None] * put[:, None, :]
        return total, found * fade + (k * q).sum(1, keepdims=True) * put


class DeltaNet(nnx.Module):
    """The layer: projections, the rule, a norm over each head's values that a gate follows, a projection back."""

    def __init__(self, config: ModelConfig, layer: int, dtype: jnp.dtype):
        made, m = config.recurrent, config.hidden_dim
        assert made is not None
        self.place, self.head_dim = config.place_of(layer), made.head_dim
        self.q = Linear(m, made.num_groups * made.state_dim, dtype)
        self.k = Linear(m, made.num_groups * made.state_dim, dtype)
        self.v = Linear(m, made.inner_dim, dtype)
        self.z = Linear(m, made.inner_dim, dtype)
        self.beta = Linear(m, made.num_heads, dtype)
        self.step = Linear(m, made.num_heads, dtype)
        self.rule = DeltaRule(made, dtype)
        self.norm = RMSNorm(made.head_dim, config.norm_eps, WIDE)
        self.o = Linear(made.inner_dim, m, dtype)

    def __call__(self, x: Float[Array, "..."], angles: Any, cache: Any, advance: Advance) -> tuple[Float[Array, "..."], Any]:
        mixed = jnp.concatenate([as_rows(project(x)) for project in (self.q, self.k, self.v)], axis=1)
        inputs = (mixed, rows_of(self.beta, x), rows_of(self.step, x))
        out, cache = advance(self.place, self.rule, inputs, cache)
        gate = split_heads(self.z(x), self.head_dim).astype(jnp.float32)
        return self.o(join_heads((self.norm(out) * jax.nn.silu(gate)).astype(x.dtype))), cache
