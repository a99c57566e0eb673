"""Contexts that shift, on the device: keys of pages that move up turn back to their new positions. Knows pages, not who owns them.

A key is stored with the rotation of its position, and rotations add up (RoFormer, https://arxiv.org/abs/2104.09864, section 3.2.2):
turning the key of position m back by n gives the key of position m - n. Values know no position. What was computed from tokens that are
gone by now stays as it was computed then.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.cells import decode, encode
from jaxkv.config import Config, scheduler_config
from jaxkv.errors import ConfigError, RequestError
from jaxkv.models import ModelConfig
from jaxkv.models.families import model_class
from jaxkv.pool import PoolArrays, PoolLayout
from jaxkv.request import SamplingParams
from jaxkv.scheduler import BadShift, ContextShift, SchedulerConfig, Shift, whole_pages

ROTATE_PAGES = 16  # pages turned by one run of the program

MoveKeys = Callable[[int, Float[Array, "k z d"], Int[Array, ""]], Float[Array, "k z d"]]


def rotate_step(move_keys: MoveKeys, layout: PoolLayout) -> Callable[..., PoolArrays]:
    """Pages whose keys move by so many positions, and land in other pages or, mostly, in the same; padding ids lie beyond the pool."""

    def rotate(pool: PoolArrays, sources: Int[Array, " p"], targets: Int[Array, " p"], distance: Int[Array, ""]) -> PoolArrays:
        def turned(layer: int, keys: Array) -> Array:
            cells = decode(jnp.take(keys, sources, axis=0, mode="clip"), layout)
            return encode(jax.vmap(lambda page: move_keys(layer, page, distance))(cells), layout)

        moved = [(turned(i, keys), jnp.take(values, sources, axis=0, mode="clip")) for i, (keys, values) in enumerate(pool)]
        return [
            (keys.at[targets].set(new_keys, mode="drop"), values.at[targets].set(new_values, mode="drop"))
            for (keys, values), (new_keys, new_values) in zip(pool, moved, strict=True)
        ]

    return rotate


def rotate_pages(run: Callable[..., PoolArrays], pool: PoolArrays, shift: Shift, num_pages: int) -> PoolArrays:
    """Carry out one shift, a fixed number of pages at a time, always cut at the same pages of the context."""
    for start in range(0, len(shift.pages), ROTATE_PAGES):
        sources, targets = (np.full(ROTATE_PAGES, num_pages + 1, np.int32) for _ in range(2))
        part = slice(start, start + ROTATE_PAGES)
        sources[: len(shift.sources[part])] = shift.sources[part]
        targets[: len(shift.pages[part])] = shift.pages[part]
        pool = run(pool, sources, targets, np.int32(-shift.n_discard))
    return pool


def asked_shift(params: SamplingParams, settings: SchedulerConfig, *, is_possible: bool) -> ContextShift | None:
    """The shift that a request asks for; RequestError where it cannot be had."""
    if not params.context_shift:
        return None
    if not is_possible:
        raise RequestError(f"context_shift: got true, {_NOT_POSSIBLE}; leave it out", "context_shift")
    try:
        return whole_pages(settings, params.context_len, params.n_keep, params.n_discard)
    except BadShift as error:
        raise RequestError(str(error), error.field) from error


def check_default_shift(config: Config, model: ModelConfig, *, num_pages: int, max_len: int) -> None:
    """Refuse a configuration whose requests would all shift their contexts and never can; ConfigError."""
    request = config.request
    if not request.context_shift:
        return
    if model.state_layers or key_mover(model_class(model.model_type), model) is None:
        raise ConfigError(f"request.context_shift: got true, {_NOT_POSSIBLE}; set it to false")
    settings = scheduler_config(config, num_pages=num_pages, max_len=max_len, chunk_bytes=0, budget=None, hold=False)
    try:
        whole_pages(settings, request.context_len, request.n_keep or 0, request.n_discard)
    except BadShift as error:
        raise ConfigError(f"request.{error}") from error


_NOT_POSSIBLE = "but this model's keys do not simply turn with their position, so they cannot be moved"


def key_mover(model_class: Any, model_config: Any) -> MoveKeys | None:
    """How a family moves its keys; None where it cannot. The result holds on to the class, whose name a program's key can tell."""
    if not hasattr(model_class, "move_keys"):
        return None
    return lambda layer, keys, distance: model_class.move_keys(model_config, layer, keys, distance)
