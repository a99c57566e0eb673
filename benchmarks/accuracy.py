"""How far narrower numbers move a model's predictions: the divergence from float32 at every token of a fixed text.

A model says how likely each token of its vocabulary comes next. KL(float32 || narrow) is how many nats longer, on average, the surprise is
of somebody who believes the narrow model while the float32 one is right; 0 is the same prediction. The floor is the same float32 model with
its prompt cut into chunks of another width: nothing but other rounding. Texts come out otherwise where two tokens are about as likely as
each other; `same_top` is how often both name the same likeliest token.

The text goes through the pool in chunks as a prompt does, so keys and values are read back in the precision they are stored in.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import Setup, run, say
from jaxtyping import Array

from jaxkv.attention import paged_attend, table_width
from jaxkv.config import Config
from jaxkv.models import Checkpoint, load_checkpoint
from jaxkv.pool import allocate
from jaxkv.programs import run_layers, take_apart
from jaxkv.startup import Outline, outline
from jaxkv.states import advance_chunk

TEXT = Path(__file__).with_name("accuracy.txt")
WIDE = {"model.dtype": "float32", "pool.kv_dtype": "float32"}
OPTIONS: dict[str, Any] = {"tokens": 0, "other_chunk": 32}  # of the text, 0 is all of it; for the floor


def variants(other_chunk: int) -> dict[str, dict[str, Any]]:
    """What is compared with float32, by name: dtype, keys and values where they are others, weights where they are others."""
    cells, weights = {"pool.kv_dtype": "int8"}, {"model.weight_dtype": "int8"}
    found: dict[str, dict[str, Any]] = {"float32_other_chunks": {**WIDE, "scheduler.prefill_chunk": other_chunk}}
    found["float32_kv_bfloat16"] = {**WIDE, "pool.kv_dtype": "bfloat16"}
    for dtype in ("float32", "bfloat16", "float16"):
        own = {"model.dtype": dtype, "pool.kv_dtype": dtype}
        found |= {f"{dtype}_kv_int8": {**own, **cells}, f"{dtype}_weights_int8": {**own, **weights}}
        found |= {f"{dtype}_kv_int8_weights_int8": {**own, **cells, **weights}}
        if dtype != "float32":
            found[dtype] = own
    return dict(sorted(found.items()))


def measure(setup: Setup) -> dict[str, Any]:
    """All figures."""
    setup.facts["dtype"] = "float32"
    reference = _Model(setup, WIDE)
    tokens = reference.tokens(setup.options.tokens)
    expected = np.concatenate([np.asarray(logits) for logits in reference.logits(tokens)])
    found = {"float32": _compare(reference, tokens, expected)}
    del reference
    for name, fields in variants(setup.options.other_chunk).items():
        found[name] = _compare(_Model(setup, fields), tokens, expected)
        one = found[name]
        say(f"{name:28s} KL {one['kl']:.2e}, p99 {one['kl_p99']:.2e}, max {one['kl_max']:.2e}; same top {one['same_top']:.4f}")
    return {"tokens": len(tokens), "variants": found}


class _Model:
    """A model in one precision, with a pool that holds the whole text."""

    def __init__(self, setup: Setup, fields: Mapping[str, Any]) -> None:
        config: Config = setup.config({"pool.tokens": setup.config().pool.tokens or 64, **fields})
        self._setup, self.plan = setup, outline(config)
        self.checkpoint = _load(self.plan)

    def tokens(self, num: int) -> np.ndarray:
        """The text, or the first so many tokens of it; random ones for a model that has no tokenizer."""
        tokenizer, longest = self.checkpoint.tokenizer, self.plan.shapes.max_len
        random = np.random.default_rng(0).integers(3, self.plan.info.config.vocab_size, longest).tolist()
        found = random if tokenizer is None else tokenizer.encode(TEXT.read_text(encoding="utf-8"))
        return np.array(found[: min(num or len(found), longest)], np.int32)

    def logits(self, tokens: np.ndarray) -> Iterator[Array]:
        """Those of every position, chunk by chunk."""
        chunk = self.plan.shapes.chunk
        num_pages = -(-len(tokens) // self.plan.layout.page_size)
        layout = replace(self.plan.layout, num_pages=num_pages if self.plan.layout.num_layers else 0)
        weights, rebuild = take_apart(self.checkpoint.model)

        def step(weights: Any, pool: Any, ids: Array, start: Array, length: Array, table: Array) -> tuple[Any, Array]:
            model, at = rebuild(weights), jnp.arange(chunk)
            positions = jnp.where(at < length, start + at, 0)
            attend = paged_attend(layout, table, positions[None], (at < length)[None])
            hidden, pool = run_layers(model, layout, ids, positions, pool, attend, advance_chunk(layout, jnp.int32(0), start, length))
            return pool, model.logits(hidden)

        run_step, pool = jax.jit(step, donate_argnums=1), allocate(layout, self.plan.mesh)
        table = np.zeros((1, table_width(self.plan.shapes.max_len, layout.page_size)), np.int32)
        table[0, :num_pages] = np.arange(1, num_pages + 1)
        with jax.default_matmul_precision("highest" if self.plan.dtype == "float32" else "default"):
            for start in range(0, len(tokens), chunk):
                piece = tokens[start : start + chunk]
                ids = np.zeros(chunk, np.int32)
                ids[: len(piece)] = piece
                pool, logits = run_step(weights, pool, ids, np.int32(start), np.int32(len(piece)), table)
                yield logits[: len(piece)]


def _load(plan: Outline) -> Checkpoint:
    return load_checkpoint(plan.info, dtype=plan.dtype, mesh=plan.mesh, weight_dtype=plan.weight_dtype)


@jax.jit
def _differences(expected: Array, found: Array, following: Array) -> tuple[Array, Array, Array]:
    """Of every row KL(expected || found), whether both have the same likeliest token, and the surprise at what follows; in nats."""
    p, q = jax.nn.log_softmax(expected), jax.nn.log_softmax(found)
    return (jnp.exp(p) * (p - q)).sum(-1), expected.argmax(-1) == found.argmax(-1), -jnp.take_along_axis(q, following[:, None], 1)[:, 0]


def _compare(model: _Model, tokens: np.ndarray, expected: np.ndarray) -> dict[str, Any]:
    following, start, parts = np.append(tokens[1:], tokens[:1]), 0, []
    for logits in model.logits(tokens):
        rows = slice(start, start + len(logits))
        parts.append([np.asarray(x) for x in _differences(expected[rows], logits, following[rows])])
        start += len(logits)
    kl, same, nats = map(np.concatenate, zip(*parts, strict=True))
    layout = model.plan.layout
    return {
        "kl": float(kl.mean()),
        "kl_p99": float(np.quantile(kl, 0.99)),
        "kl_max": float(kl.max()),
        "same_top": round(float(same.mean()), 5),
        "nats_per_token": round(float(nats[:-1].mean()), 5),
        "kv_bytes_per_token": layout.page_bytes // layout.page_size,
        "weight_mb": round(sum(x.nbytes for x in take_apart(model.checkpoint.model)[0]) / 1e6, 1),
    }


if __name__ == "__main__":
    run(__doc__, measure, rounds=1, options=OPTIONS)
