"""The logprobs of a prompt's own tokens, inside the prefill program. Knows no request, no page and no chunk's place in its prompt.

The head runs over a chunk in blocks of rows, so that the logits of a block are all that is held at a time, and only where somebody asks:
other chunks pass through a branch that makes zeros.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.request import MAX_TOP_LOGPROBS
from jaxkv.sampling import HostOrDevice

SCORE_BLOCK = 16  # rows of the head at a time: 3 MiB of logits with a vocabulary of 49152


class Targets(NamedTuple):
    """Which tokens follow those of a chunk, and whether anybody wants to know how likely they were."""

    tokens: Int[HostOrDevice, " t"]  # the one after each token of the chunk
    wanted: Bool[HostOrDevice, ""]
    wants_top: Bool[HostOrDevice, ""]  # the most likely tokens too


class Scores(NamedTuple):
    """How likely each target was, and the most likely tokens in its place; zeros where nobody asked."""

    logprob: Float[Array, " t"]
    top_ids: Int[Array, "t n"]
    top_logprobs: Float[Array, "t n"]


def no_targets(chunk: int) -> Targets:
    """Nobody asks, as NumPy arrays."""
    return Targets(np.zeros(chunk, np.int32), np.bool_(False), np.bool_(False))  # type: ignore[arg-type]


def score(hidden: Float[Array, "t m"], length: Int[Array, ""], targets: Targets, vocab_size: int, head: Callable[[Array], Array]) -> Scores:
    """The scores of the first `length` rows (the others are of no meaning); `head` makes logits of hidden states."""
    t, k = hidden.shape[0], min(MAX_TOP_LOGPROBS, vocab_size)
    block = min(SCORE_BLOCK, t)
    size = -(-t // block) * block
    blank = Scores(jnp.zeros(size, jnp.float32), jnp.zeros((size, k), jnp.int32), jnp.zeros((size, k), jnp.float32))

    def scored(_: None) -> Scores:
        rows, tokens = jnp.pad(hidden, ((0, size - t), (0, 0))), jnp.pad(jnp.asarray(targets.tokens), (0, size - t))

        def turn(i: Array, found: Scores) -> Scores:
            first = i * block
            here = score_block(
                head(lax.dynamic_slice_in_dim(rows, first, block, axis=0)),
                lax.dynamic_slice_in_dim(tokens, first, block, axis=0),
                jnp.asarray(targets.wants_top),
                k,
            )
            return Scores(*(lax.dynamic_update_slice_in_dim(all_, new, first, axis=0) for all_, new in zip(found, here, strict=True)))

        return lax.fori_loop(0, (length + block - 1) // block, turn, blank)

    found = lax.cond(targets.wanted, scored, lambda _: blank, None)
    return Scores(*(array[:t] for array in found))


def score_block(logits: Float[Array, "r v"], tokens: Int[Array, " r"], wants_top: Bool[Array, ""], k: int) -> Scores:
    """Natural logs of the model's own distribution. A target that is the likeliest token has the very bits of the first alternative."""
    r = logits.shape[0]
    log_total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0] - log_total

    def top(_: None) -> tuple[Array, Array]:
        values, ids = lax.top_k(logits, k)
        return ids.astype(jnp.int32), values - log_total[:, None]

    ids, values = lax.cond(wants_top, top, lambda _: (jnp.zeros((r, k), jnp.int32), jnp.zeros((r, k), jnp.float32)), None)
    return Scores(chosen, ids, values)
