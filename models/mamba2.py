"""The second Mamba family (`model_type` mamba2): heads instead of channels, each with one rate (https://arxiv.org/abs/2405.21060).

    S <- exp(dt A) S + B (dt x)^T        out = S^T C + D x

S is a matrix [n, d] per head; what is stored and found under (B and C) is shared by the heads of a group and goes through the convolution.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.models.config import ModelConfig, Recurrent
from jaxkv.models.decoder import Layer
from jaxkv.models.interface import Advance
from jaxkv.models.layers import WIDE, Linear, as_rows, ones, works_in_columns, zeros
from jaxkv.models.mamba import Mamba, MambaBlock
from jaxkv.models.recurrent import Recurrence, look_up, rows_of, turn_blocks

BLOCK = 32  # tokens of a prompt that are computed together
product = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class HeadScan(Recurrence):
    """The convolution over values and what they are stored and found under, and each head's matrix."""

    def __init__(self, made: Recurrent, dtype: jnp.dtype):
        super().__init__(made, dtype)
        self.made = made
        self.log_rate = zeros((made.num_heads,), WIDE)
        self.step_bias = ones(made.num_heads, WIDE)
        self.skip = ones(made.num_heads, WIDE)

    def prepare(self, x: Float[Array, "t c"], *rest: Float[Array, "t h"]) -> tuple[Float[Array, "t ..."], ...]:
        made, t = self.made, x.shape[0]
        values, put, get = jnp.split(x, [made.inner_dim, made.inner_dim + made.num_groups * made.state_dim], axis=1)
        put, get = (y.reshape(t, made.num_groups, made.state_dim) for y in (put, get))
        step = jax.nn.softplus(rest[0] + self.step_bias[...][None])
        log_fade = step * -jnp.exp(self.log_rate[...])[None]
        return values.reshape(t, made.num_heads, made.head_dim), step, log_fade, put, get

    def of_heads(self, y: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
        """What each head has of its group."""
        return jnp.repeat(y, self.made.num_heads // self.made.num_groups, axis=axis)

    def turn(self, total: Float[Array, "h n d"], *token: Float[Array, "..."]) -> tuple[Float[Array, "h n d"], Float[Array, "h d"]]:
        x, step, log_fade, *keys = token
        put, get = (self.of_heads(y, 0) for y in keys)
        added, fade = step[:, None] * x, jnp.exp(log_fade)[:, None]
        found, _ = look_up(total, get, get)
        total = total * fade[:, :, None] + put[:, :, None] * added[:, None, :]
        return total, found * fade + (put * get).sum(1, keepdims=True) * added + self.skip[...][:, None] * x

    def turns(
        self, total: Float[Array, "h n d"], tokens: tuple[Float[Array, "t ..."], ...], num_valid: Int[Array, ""]
    ) -> tuple[Float[Array, "h n d"], Float[Array, "t h d"]]:
        """A block of tokens at a time, as products (the paper's section 6): twice as fast on XLA:CPU as token after token.

        What token s adds has faded by exp(F[t] - F[s]) at token t, F being the sum of log fades up to and with a token.
        """

        def block(total: Array, x: Array, step: Array, log_fade: Array, put: Array, get: Array) -> tuple[Array, Array]:
            faded = jnp.cumsum(log_fade, axis=0)  # [c, h]
            seen = jnp.tril(jnp.ones((BLOCK, BLOCK), bool))[:, :, None]
            between = jnp.exp(jnp.where(seen, faded[:, None] - faded[None], -jnp.inf))
            added = step[:, :, None] * x
            met = self.of_heads(product("tgn,sgn->tsg", get, put), 2)
            out = product("tsh,shd->thd", met * between, added)
            out += product("thn,hnd->thd", self.of_heads(get, 1) * jnp.exp(faded)[:, :, None], total)
            rest = self.of_heads(put, 1) * jnp.exp(faded[-1:] - faded)[:, :, None]
            total = total * jnp.exp(faded[-1])[:, None, None] + product("shn,shd->hnd", rest, added)
            return total, out + self.skip[...][None, :, None] * x

        return turn_blocks(block, BLOCK, total, tokens, num_valid)


class Mamba2Mixer(nnx.Module):
    """Into heads and gate, through the scan, gated, normalised by groups, and back."""

    def __init__(self, config: ModelConfig, layer: int, dtype: jnp.dtype):
        made, m = config.recurrent, config.hidden_dim
        assert made is not None
        self.made, self.place, self.eps = made, config.place_of(layer), config.norm_eps
        shared = made.num_groups * made.state_dim
        self.z = Linear(m, made.inner_dim, dtype, bias=made.bias)
        self.x = Linear(m, made.inner_dim, dtype, bias=made.bias)
        self.put = Linear(m, shared, dtype, bias=made.bias)
        self.get = Linear(m, shared, dtype, bias=made.bias)
        self.step = Linear(m, made.num_heads, dtype, bias=made.bias)
        self.scan = HeadScan(made, dtype)
        self.scale = ones(made.inner_dim, dtype)
        self.o = Linear(made.inner_dim, m, dtype, bias=made.bias)

    def __call__(self, x: Float[Array, "..."], cache: Any, advance: Advance) -> tuple[Float[Array, "..."], Any]:
        mixed = jnp.concatenate([as_rows(project(x)) for project in (self.x, self.put, self.get)], axis=1)
        out, cache = advance(self.place, self.scan, (mixed, rows_of(self.step, x)), cache)
        y = out.reshape(out.shape[0], -1) * jax.nn.silu(rows_of(self.z, x))
        groups = y.reshape(y.shape[0], self.made.num_groups, -1)
        groups = groups * lax.rsqrt(jnp.mean(groups * groups, axis=-1, keepdims=True) + self.eps)
        y = groups.reshape(y.shape) * self.scale[...].astype(jnp.float32)[None]
        return self.o((y.T if works_in_columns(x.dtype) else y).astype(x.dtype)), cache


class Mamba2(Mamba):
    """Decoder-only state space model with heads."""

    @staticmethod
    def make_block(config: ModelConfig, layer: int, dtype: jnp.dtype) -> Layer:
        return MambaBlock(config, dtype, Mamba2Mixer(config, layer, dtype))
