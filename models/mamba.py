"""The Mamba family (`model_type` mamba): layers of one kind only, each a selective state space (https://arxiv.org/abs/2312.00752).

Every channel has a sum of `state_dim` numbers. How far a token lets them fade, and under what it stores and finds, is computed from it:

    S <- exp(dt A) S + dt x B^T        out = S C + D x
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxkv.models.config import ModelConfig, Recurrent
from jaxkv.models.decoder import Layer, Stack, stream_norm
from jaxkv.models.interface import Advance
from jaxkv.models.layers import WIDE, Linear, as_rows, ones, works_in_columns, zeros
from jaxkv.models.recurrent import Recurrence, rows_through


class SelectiveScan(Recurrence):
    """The convolution over channels, and each channel's sum."""

    def __init__(self, made: Recurrent, dtype: jnp.dtype):
        super().__init__(made, dtype)
        self.made, self.dtype = made, dtype
        self.mix = Linear(made.inner_dim, made.step_rank + 2 * made.state_dim, dtype)
        self.step_size = Linear(made.step_rank, made.inner_dim, dtype, bias=True)
        self.log_rate = zeros((made.inner_dim, made.state_dim), WIDE)
        self.skip = ones(made.inner_dim, WIDE)

    def prepare(self, x: Float[Array, "t i"], *rest: Array) -> tuple[Float[Array, "t ..."], ...]:
        rank, n = self.made.step_rank, self.made.state_dim
        mixed = rows_through(self.mix, x.astype(self.dtype))
        step = jax.nn.softplus(rows_through(self.step_size, mixed[:, :rank].astype(self.dtype)))
        return x, step, mixed[:, rank : rank + n], mixed[:, rank + n :]

    def turn(self, total: Float[Array, "n i"], *token: Float[Array, "..."]) -> tuple[Float[Array, "n i"], Float[Array, " i"]]:
        x, step, put, get = token
        fade = jnp.exp(step[None, :] * -jnp.exp(self.log_rate[...].T))
        total = fade * total + (step * x)[None, :] * put[:, None]
        return total, (total * get[:, None]).sum(0) + self.skip[...] * x


class MambaMixer(nnx.Module):
    """Into channels and gate, through the scan, gated, and back."""

    def __init__(self, config: ModelConfig, layer: int, dtype: jnp.dtype):
        made, m = config.recurrent, config.hidden_dim
        assert made is not None
        self.place = config.place_of(layer)
        self.x = Linear(m, made.inner_dim, dtype, bias=made.bias)
        self.z = Linear(m, made.inner_dim, dtype, bias=made.bias)
        self.scan = SelectiveScan(made, dtype)
        self.o = Linear(made.inner_dim, m, dtype, bias=made.bias)

    def __call__(self, x: Float[Array, "..."], cache: Any, advance: Advance) -> tuple[Float[Array, "..."], Any]:
        out, cache = advance(self.place, self.scan, (as_rows(self.x(x)),), cache)
        gated = (out.T if works_in_columns(x.dtype) else out) * jax.nn.silu(self.z.wide(x))
        return self.o(gated.astype(x.dtype)), cache


class MambaBlock(nnx.Module):
    """One layer: x + mixer(norm x), where x stays in float32 whatever the model's dtype."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, mixer: Any):
        self.norm, self.mixer, self.dtype = stream_norm(config, dtype), mixer, dtype

    def __call__(self, x: Float[Array, "..."], angles: Any, cache: Any, advance: Advance) -> tuple[Float[Array, "..."], Any]:
        mixed, cache = self.mixer(self.norm(x.astype(self.dtype)), cache, advance)
        return x + mixed.astype(x.dtype), cache


class Mamba(Stack):
    """Decoder-only state space model."""

    @staticmethod
    def make_block(config: ModelConfig, layer: int, dtype: jnp.dtype) -> Layer:
        return MambaBlock(config, dtype, MambaMixer(config, layer, dtype))

    def embedded(self, tokens: Int[Array, " t"]) -> Float[Array, "..."]:
        return self.embed(tokens).astype(jnp.float32)
