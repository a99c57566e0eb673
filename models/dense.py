"""Attention and recurrence without a cache: the slow, obvious reference that everything with one is compared with.

A sequence is computed whole, from its first token, so nothing has to be kept.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.models.config import ModelConfig
from jaxkv.models.interface import Advance, Inputs, LanguageModel, Recurrence
from jaxkv.models.states import state_shapes


def dense_attend(
    layer: int,
    q: Float[Array, "t h d"],
    k: Float[Array, "t k d"],
    v: Float[Array, "t k d"],
    cache: Any,
    *,
    scale: float,
    window: int | None = None,
) -> tuple[Float[Array, "t h d"], Any]:
    """Causal attention of a whole sequence over itself, in float32; the cache passes through untouched."""
    t, h, d = q.shape
    num_kv = k.shape[1]
    grouped = q.astype(jnp.float32).reshape(t, num_kv, h // num_kv, d)
    highest = lax.Precision.HIGHEST
    scores = jnp.einsum("tkgd,skd->kgts", grouped, k.astype(jnp.float32), precision=highest) * scale
    age = jnp.arange(t)[:, None] - jnp.arange(t)[None, :]
    visible = (age >= 0) & (age < (t if window is None else window))
    weights = jax.nn.softmax(jnp.where(visible[None, None], scores, -jnp.inf), axis=-1)
    out = jnp.einsum("kgts,skd->tkgd", weights, v.astype(jnp.float32), precision=highest)
    return out.reshape(t, h, d).astype(q.dtype), cache


def dense_advance(config: ModelConfig, dtype: str) -> Advance:
    """A whole sequence from the state before its first token, as one chunk; the cache passes through untouched."""
    shapes = state_shapes(config, dtype)

    def advance(layer: int, mixer: Recurrence, inputs: Inputs, cache: Any) -> tuple[Float[Array, "t ..."], Any]:
        state = tuple(jnp.zeros(shape.shape, shape.dtype) for shape in shapes[layer])
        outputs, _ = mixer.chunk(inputs, state, jnp.int32(inputs[0].shape[0]))
        return outputs, cache

    return advance


def dense_logits(model: LanguageModel, tokens: Int[Array, " t"]) -> Float[Array, "t v"]:
    """The logits at every position of one sequence, computed all at once."""
    advance = dense_advance(model.config, model.dtype.name)
    hidden, _ = model(tokens, jnp.arange(tokens.shape[0]), None, dense_attend, advance)
    return model.logits(hidden)
