"""What every recurrent layer shares: a causal convolution with a window of its last inputs, then a sum that each token turns on.

A layer says how its tokens are prepared, all at once, and how one token turns the sum. Knows no family and no cache.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.models.config import Recurrent
from jaxkv.models.interface import Inputs, State
from jaxkv.models.layers import Linear, works_in_columns, zeros

Turn = Callable[..., tuple[Array, Array]]


class Recurrence(nnx.Module):
    """The convolution of the first of a layer's inputs, [t, c] in the model's dtype, and the turns of the sum.

    The window holds inputs as they come, so a token finds the same numbers there as in its own chunk.
    """

    def __init__(self, made: Recurrent, dtype: jnp.dtype):
        self.taps = zeros((made.conv_len, made.conv_dim), dtype)  # the last one is the token's own
        if made.conv_bias:
            self.taps_bias = zeros((made.conv_dim,), dtype)

    def prepare(self, x: Float[Array, "t c"], *rest: Float[Array, "t ..."]) -> tuple[Float[Array, "t ..."], ...]:
        """What each token's turn needs, in float32, of its convolved input and its other inputs."""
        raise NotImplementedError

    def turn(self, total: Float[Array, "..."], *token: Float[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """The sum with one token in it, and what the token finds there."""
        raise NotImplementedError

    def turns(
        self, total: Float[Array, "..."], tokens: tuple[Float[Array, "t ..."], ...], num_valid: Int[Array, ""]
    ) -> tuple[Float[Array, "..."], Float[Array, "t ..."]]:
        """The sum with the first `num_valid` tokens in it, and what each finds."""
        return turn_all(self.turn, total, tokens, num_valid)

    def step(self, inputs: Inputs, states: State) -> tuple[Float[Array, "b ..."], State]:
        """One token of each of b sequences."""
        x, *rest = inputs
        windows, totals = states
        seen = jnp.concatenate([windows, x[:, None].astype(windows.dtype)], axis=1)
        tokens = self.prepare(self.convolve([seen[:, i] for i in range(seen.shape[1])]), *rest)
        totals, out = jax.vmap(self.turn)(totals, *tokens)
        return out, (seen[:, 1:], totals)

    def chunk(self, inputs: Inputs, state: State, num_valid: Int[Array, ""]) -> tuple[Float[Array, "t ..."], State]:
        """The next t tokens of one sequence; padding is never looked at."""
        x, *rest = inputs
        window, total = state
        t, before = x.shape[0], window.shape[0]
        seen = jnp.concatenate([window, x.astype(window.dtype)])
        tokens = self.prepare(self.convolve([seen[i : i + t] for i in range(before + 1)]), *rest)
        total, out = self.turns(total, tokens, num_valid)
        return out, (lax.dynamic_slice_in_dim(seen, num_valid, before), total)

    def convolve(self, shifted: list[Float[Array, "t c"]]) -> Float[Array, "t c"]:
        """silu of the sum over taps, in float32; `shifted` has the inputs that each tap meets."""
        taps = self.taps[...].astype(jnp.float32)[:, None]
        y = shifted[0].astype(jnp.float32) * taps[0]
        for x, tap in zip(shifted[1:], taps[1:], strict=True):
            y += x.astype(jnp.float32) * tap
        return jax.nn.silu(y + self.taps_bias[...].astype(jnp.float32)[None] if hasattr(self, "taps_bias") else y)


def turn_all(
    turn: Turn, total: Float[Array, "..."], tokens: tuple[Float[Array, "t ..."], ...], num_valid: Int[Array, ""]
) -> tuple[Float[Array, "..."], Float[Array, "t ..."]]:
    """Token after token, and no further than they are valid; zeros for the others."""
    t = tokens[0].shape[0]
    found = jax.eval_shape(turn, total, *(x[0] for x in tokens))[1]

    def body(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        total, out = carry
        total, y = turn(total, *(lax.dynamic_index_in_dim(x, i, keepdims=False) for x in tokens))
        return total, lax.dynamic_update_index_in_dim(out, y, i, 0)

    return lax.fori_loop(0, num_valid, body, (total, jnp.zeros((t, *found.shape), found.dtype)))


def turn_blocks(
    block: Turn, length: int, total: Float[Array, "..."], tokens: tuple[Float[Array, "t ..."], ...], num_valid: Int[Array, ""]
) -> tuple[Float[Array, "..."], Float[Array, "t ..."]]:
    """Block after block, as far as any token is valid; to a block the others are zeros, and have to change nothing."""
    t = tokens[0].shape[0]
    missing = -t % length

    def filled(x: Array) -> Array:
        valid = (jnp.arange(t) < num_valid).reshape(t, *(1,) * (x.ndim - 1))
        return jnp.pad(jnp.where(valid, x, 0), [(0, missing)] + [(0, 0)] * (x.ndim - 1))

    tokens = tuple(map(filled, tokens))
    found = jax.eval_shape(block, total, *(x[:length] for x in tokens))[1]

    def body(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        total, out = carry
        total, y = block(total, *(lax.dynamic_slice_in_dim(x, i * length, length) for x in tokens))
        return total, lax.dynamic_update_slice_in_dim(out, y, i * length, 0)

    start = (total, jnp.zeros((t + missing, *found.shape[1:]), found.dtype))
    total, out = lax.fori_loop(0, (num_valid + length - 1) // length, body, start)
    return total, out[:t]


def look_up(
    total: Float[Array, "h i d"], first: Float[Array, "h i"], second: Float[Array, "h i"]
) -> tuple[Float[Array, "h d"], Float[Array, "h d"]]:
    """What each head's matrix holds under two keys.

    Both in one product: with 32 heads of 128 x 128 a token takes 83 us on XLA:CPU, 270 where each is a sum of its own.
    """
    both = jnp.einsum("hid,hni->hnd", total, jnp.stack([first, second], axis=1), precision=lax.Precision.HIGHEST)
    return both[:, 0], both[:, 1]


def rows_through(project: Linear, rows: Float[Array, "t i"]) -> Float[Array, "t o"]:
    """A product of rows, in float32, whatever way round the layers like them."""
    return project.wide(rows.T).T if works_in_columns(rows.dtype) else project.wide(rows)


def rows_of(project: Linear, x: Float[Array, "..."]) -> Float[Array, "t o"]:
    """A product of the stream, as rows of float32."""
    wide = project.wide(x)
    return wide.T if works_in_columns(x.dtype) else wide
