"""The head that Qwen3-Next, Qwen3.5 and 3.6 bring to guess the token after the next. Knows no cache, and not who checks its guesses.

At position t it is given the next token t + 1 and the target's hidden state of t, after the target's last norm, and answers with a hidden
state of its own, from which the target's output head makes logits for t + 2. To guess further it is given its own hidden state and guess:

    tokens       a  b  c  d            known
    target       .  .  .  h(d)         hidden states, logits: e
    head            b  c  d  e         with h(a) h(b) h(c) h(d): logits: f; then f with its own hidden state: g

One layer of attention with keys of its own: `attend` is called with layer 0 and the head's cache.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import SPLIT, stream_norm
from jaxkv.models.interface import Attend
from jaxkv.models.layers import Linear, as_rows, rope_angles, rope_frequencies, stream_axis, works_in_columns
from jaxkv.models.qwen3_next import Qwen3Next
from jaxkv.models.sharding import by_rule

MODEL_TYPE = "draft_head"  # of the head's config, as a family has one


def draft_config(target: ModelConfig) -> ModelConfig:
    """The head's numbers: those of a model of one layer, with attention and with experts where the target has any."""
    experts = None if target.experts is None else replace(target.experts, dense_layers=())
    return replace(target, model_type=MODEL_TYPE, num_layers=1, recurrent=None, experts=experts)


class DraftHead(nnx.Module):
    """Embedding and hidden state, each behind a norm, side by side through a product, a layer of attention and a last norm."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.token_norm = stream_norm(config, dtype, plus_one=True)
        self.hidden_norm = stream_norm(config, dtype, plus_one=True)
        self.join = Linear(2 * config.hidden_dim, config.hidden_dim, dtype)
        self.layer = Qwen3Next.make_block(config, 0, dtype)
        self.norm = stream_norm(config, dtype, plus_one=True)

    def __call__(
        self,
        target: Qwen3Next,
        tokens: Int[Array, " t"],
        hidden: Float[Array, "t m"],
        positions: Int[Array, " t"],
        cache: Any,
        attend: Attend,
    ) -> tuple[Float[Array, "t m"], Any]:
        """Hidden states for `target.logits` and for the next guess. `tokens` are one ahead of `hidden`, whose `positions` these are."""
        stream = hidden.T if works_in_columns(hidden.dtype) else hidden
        parts = [self.token_norm(target.embedded(tokens)), self.hidden_norm(stream)]
        angles = rope_angles(positions, rope_frequencies(self.config.rope, self.config.turning_dim))
        x, cache = self.layer(self.join(jnp.concatenate(parts, axis=stream_axis(self.dtype))), angles, cache, attend)
        return as_rows(self.norm(x)), cache

    @staticmethod
    def partition(path: str, shape: tuple[int, ...], num_shards: int) -> PartitionSpec:
        """As a family's layers are split; the product that joins is not."""
        return by_rule(SPLIT, path, shape, num_shards)
