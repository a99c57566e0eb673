"""Attention without a cache: the slow, obvious reference that every other attention is compared with."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.models.interface import LanguageModel


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


def dense_logits(model: LanguageModel, tokens: Int[Array, " t"]) -> Float[Array, "t v"]:
    """The logits at every position of one sequence, computed all at once."""
    hidden, _ = model(tokens, jnp.arange(tokens.shape[0]), None, dense_attend)
    return model.logits(hidden)
