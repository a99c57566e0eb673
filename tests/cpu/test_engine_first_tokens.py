"""The first token of an answer, which the prompt's last chunk draws and not a decode step: alone, and for all choices of a group at once."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.engine import Engine
from jaxkv.request import SamplingParams
from tests.cpu import tiny

SAMPLED = SamplingParams(temperature=5.0, top_k=20, max_tokens=3, ignore_eos=True, logprobs=20)


@pytest.fixture(scope="module")
def roomy() -> Iterator[Engine]:
    with tiny.engine(pool__tokens=512) as made:
        yield made


def drawn(top: tuple[tuple[int, float], ...], temperature: float, seed: int, choice: int, num_generated: int) -> int:
    """Gumbel-max among the likeliest tokens, by the documented key."""
    key = jax.random.wrap_key_data(jnp.array([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32), impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, choice), num_generated)
    noise = np.asarray(jax.random.gumbel(key, (tiny.VOCAB,), np.float32))
    return max(top, key=lambda entry: entry[1] / temperature + noise[entry[0]])[0]


def expected(found: Any, params: SamplingParams) -> list[int]:
    return [drawn(entry.top, params.temperature, params.seed, found.choice, index) for index, entry in enumerate(found.logprobs)]


def test_the_first_token_is_drawn_with_the_temperature_and_the_key_of_its_request(roomy: Engine) -> None:
    firsts = set()
    for seed in range(8):
        params = replace(SAMPLED, seed=seed)
        found = tiny.run(roomy, [tiny.prompt(10)], params)[0]
        assert found.token_ids == expected(found, params)
        firsts.add(found.token_ids[0])
    assert len(firsts) >= 4
