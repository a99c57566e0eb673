"""A feed-forward part of many experts, of which each token visits a few. Knows no family, no cache and no checkpoint.

Every expert's tokens are cut into tiles of a fixed number of rows, and a loop goes over the tiles there are:

    tokens 0 to 3 choose experts (0, 2) (2, 1) (0, 2) (2, 0); tiles of 2 rows:

        tile      0      1      2      3      4
        expert    0      0      1      2      2
        tokens    0 2    3 .    1 .    0 1    2 3

So experts that nobody chose cost nothing, no token is ever left out, and every product has the same shape whoever else is in the batch: a
token's bits depend neither on its place in a tile nor on who shares the tile. Its results are picked up and added in the order of its own
choices. `jax.lax.ragged_dot` would have every expert compute every row on XLA:CPU.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.models.config import Experts
from jaxkv.models.layers import GatedMLP, Linear, along_channels, as_rows, product, works_in_columns, zeros

TILE = 4  # rows of a tile; never one, XLA:CPU is many times slower there


class Tiles(NamedTuple):
    """Which tokens go to which expert. Beyond the last tile and in its empty places everything is 0, and no result is picked up there."""

    experts: Int[Array, " tiles"]
    tokens: Int[Array, "tiles rows"]
    num_tiles: Int[Array, ""]
    places: Int[Array, "t c"]  # where the result of each token's choices is, counted in rows of all tiles


def list_tiles(chosen: Int[Array, "t c"], num_experts: int, rows: int = TILE) -> Tiles:
    """The tiles for t tokens with c choices each; their greatest possible number depends on the shapes alone."""
    t, c = chosen.shape
    num = t * c
    most = (num + min(num_experts, num) * (rows - 1)) // rows
    expert = chosen.reshape(num)
    order = jnp.argsort(expert, stable=True)
    counts = (expert[:, None] == jnp.arange(num_experts)[None, :]).sum(0, dtype=jnp.int32)
    tiles = (counts + rows - 1) // rows
    ends = jnp.cumsum(tiles)
    ordered = expert[order]
    nth = jnp.arange(num) - (jnp.cumsum(counts) - counts)[ordered]  # of its expert's tokens
    place = (ends - tiles)[ordered] * rows + nth
    places = jnp.zeros(num, jnp.int32).at[order].set(place, unique_indices=True)
    tokens = jnp.zeros(most * rows, jnp.int32).at[place].set(order // c, unique_indices=True)
    experts = jnp.searchsorted(ends, jnp.arange(most), side="right").astype(jnp.int32)
    return Tiles(jnp.minimum(experts, num_experts - 1), tokens.reshape(most, rows), ends[-1], places.reshape(t, c))


class ExpertLinear(nnx.Module):
    """One product per expert: `weight` [e, out, in] for columns, `kernel` [e, in, out] for rows, as `Linear` has them."""

    def __init__(self, num_experts: int, in_dim: int, out_dim: int, dtype: jnp.dtype):
        if works_in_columns(dtype):
            self.weight = zeros((num_experts, out_dim, in_dim), dtype)
        else:
            self.kernel = zeros((num_experts, in_dim, out_dim), dtype)

    def __call__(self, expert: Int[Array, ""], x: Float[Array, "..."]) -> Float[Array, "..."]:
        """The expert's product in float32, of columns or rows."""

        def own(parameter: nnx.Param[Array]) -> Array:
            return lax.dynamic_index_in_dim(parameter[...], expert, keepdims=False)

        columns = works_in_columns(x.dtype)
        y = product(own(self.weight), x) if columns else product(x, own(self.kernel))
        return y * along_channels(own(self.channel_scale), columns) if hasattr(self, "channel_scale") else y


class ExpertMLP(nnx.Module):
    """For every token the sum over its chosen experts of weight * down(silu(gate x) * up x); a shared one is chosen by all."""

    def __init__(self, dim: int, experts: Experts, dtype: jnp.dtype):
        num, ffn_dim = experts.num_experts, experts.ffn_dim
        self.experts = experts
        self.router = Linear(dim, num, dtype)
        self.gate = ExpertLinear(num, dim, ffn_dim, dtype)
        self.up = ExpertLinear(num, dim, ffn_dim, dtype)
        self.down = ExpertLinear(num, ffn_dim, dim, dtype)
        if experts.shared_dim:
            self.shared = GatedMLP(dim, experts.shared_dim, dtype)
            self.shared_gate = Linear(dim, 1, dtype)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        columns = works_in_columns(x.dtype)
        weights, chosen = self.route(x)
        tiles = list_tiles(chosen, self.experts.num_experts)
        rows = as_rows(x)

        def turn(i: Array, out: Array) -> Array:
            expert, tile = tiles.experts[i], jnp.take(rows, tiles.tokens[i], axis=0, mode="clip")
            inputs = tile.T if columns else tile
            inner = (jax.nn.silu(self.gate(expert, inputs)) * self.up(expert, inputs)).astype(x.dtype)
            done = self.down(expert, inner)
            return lax.dynamic_update_slice_in_dim(out, done.T if columns else done, i * TILE, axis=0)

        start = jnp.zeros((tiles.tokens.size, rows.shape[1]), jnp.float32)
        done = lax.fori_loop(0, tiles.num_tiles, turn, start)
        total = jnp.zeros(rows.shape, jnp.float32)
        for j in range(self.experts.num_chosen):
            total += weights[:, j, None] * jnp.take(done, tiles.places[:, j], axis=0, mode="clip")
        total = total.T if columns else total
        if self.experts.shared_dim:
            total += jax.nn.sigmoid(self.shared_gate.wide(x)) * self.shared(x).astype(jnp.float32)
        return total.astype(x.dtype)

    def route(self, x: Float[Array, "..."]) -> tuple[Float[Array, "t c"], Int[Array, "t c"]]:
        """Each token's experts, the likeliest first, and what their results are weighted with: softmax over all experts, in float32."""
        wide = self.router.wide(x)
        chances = jax.nn.softmax(wide.T if works_in_columns(x.dtype) else wide, axis=-1)
        weights, chosen = lax.top_k(chances, self.experts.num_chosen)
        return (weights / weights.sum(-1, keepdims=True) if self.experts.rescale else weights), chosen
