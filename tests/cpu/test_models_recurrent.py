"""Recurrent layers: bits that must not move, and a chunk against one token after the other."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv.models.config import Recurrent
from jaxkv.models.delta import DeltaRule
from jaxkv.models.interface import Recurrence
from jaxkv.models.mamba import SelectiveScan
from jaxkv.models.mamba2 import HeadScan

T, B = 24, 4
KINDS: dict[str, tuple[Callable[..., Any], Recurrent, tuple[int, ...]]] = {
    "delta": (DeltaRule, Recurrent("delta", (0,), num_heads=4, head_dim=16, num_groups=2, state_dim=12, conv_len=4), (4, 4)),
    "mamba": (SelectiveScan, Recurrent("mamba", (0,), 1, 32, num_groups=1, state_dim=8, conv_len=4, step_rank=3, conv_bias=True), ()),
    "mamba2": (HeadScan, Recurrent("mamba2", (0,), num_heads=4, head_dim=16, num_groups=2, state_dim=12, conv_len=4, conv_bias=True), (4,)),
}


class Runner:
    """One recurrence with random weights, and inputs for it."""

    def __init__(self, kind: str, dtype: str) -> None:
        made_class, made, self.rest = KINDS[kind]
        mixer, rng = made_class(made, jnp.dtype(dtype)), np.random.default_rng(0)
        nnx.update(mixer, jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape) / 2, x.dtype), nnx.state(mixer)))
        graph, self.weights = nnx.split(mixer)
        self.made, self.dtype = made, jnp.dtype(dtype)
        self.step = jax.jit(lambda weights, *arguments: merged(graph, weights).step(*arguments))
        self.chunk = jax.jit(lambda weights, *arguments: merged(graph, weights).chunk(*arguments))

    def inputs(self, t: int, seed: int = 1) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        x = np.asarray(jnp.asarray(rng.standard_normal((t, self.made.conv_dim)), self.dtype))
        return [x, *(rng.standard_normal((t, n)).astype(np.float32) for n in self.rest)]

    def state(self, *lead: int) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(2)
        window = rng.standard_normal((*lead, self.made.conv_len - 1, self.made.conv_dim))
        return np.asarray(jnp.asarray(window, self.dtype)), rng.standard_normal((*lead, *self.made.sum_shape)).astype(np.float32)

    def run_chunk(self, inputs: list[np.ndarray], state: tuple[np.ndarray, ...], num_valid: int) -> tuple[np.ndarray, list[np.ndarray]]:
        out, after = self.chunk(self.weights, tuple(inputs), state, jnp.int32(num_valid))
        return np.asarray(out)[:num_valid], [np.asarray(x) for x in after]

    def run_step(self, inputs: list[np.ndarray], states: tuple[np.ndarray, ...]) -> tuple[np.ndarray, list[np.ndarray]]:
        out, after = self.step(self.weights, tuple(inputs), states)
        return np.asarray(out), [np.asarray(x) for x in after]


def merged(graph: Any, weights: Any) -> Recurrence:
    mixer = nnx.merge(graph, weights)
    assert isinstance(mixer, Recurrence)
    return mixer


QUICK = [("delta", "float32"), ("delta", "bfloat16"), ("mamba", "float32"), ("mamba2", "float32")]
SLOW = [pytest.param((kind, "bfloat16"), marks=pytest.mark.slow, id=f"{kind}-bfloat16") for kind in ("mamba", "mamba2")]


@pytest.fixture(scope="module", params=[*(pytest.param(each, id="-".join(each)) for each in QUICK), *SLOW])
def runner(request: pytest.FixtureRequest) -> Runner:
    return Runner(*request.param)


def same(a: tuple[np.ndarray, list[np.ndarray]], b: tuple[np.ndarray, list[np.ndarray]]) -> bool:
    return all(x.tobytes() == y.tobytes() for x, y in zip([a[0], *a[1]], [b[0], *b[1]], strict=True))


@pytest.mark.parametrize("num_valid", [1, 2, 17, T])
def test_padding_changes_no_bit_of_the_state_or_of_what_comes_before_it(runner: Runner, num_valid: int) -> None:
    inputs, state = runner.inputs(T), runner.state()
    first = runner.run_chunk(inputs, state, num_valid)
    for other in (0, 1e30, np.inf, np.nan):
        changed = [np.where(np.arange(T)[:, None] < num_valid, x, np.asarray(other, x.dtype)) for x in inputs]
        assert same(runner.run_chunk(changed, state, num_valid), first), other


def test_a_token_of_a_chunk_knows_nothing_of_those_after_it(runner: Runner) -> None:
    inputs, state = runner.inputs(T), runner.state()
    whole, _ = runner.run_chunk(inputs, state, T)
    for num_valid in (1, 2, 17):
        assert runner.run_chunk(inputs, state, num_valid)[0].tobytes() == whole[:num_valid].tobytes()


def test_a_row_of_a_step_keeps_its_bits_wherever_it_is_and_whoever_is_beside_it(runner: Runner) -> None:
    inputs, states = runner.inputs(B), runner.state(B)
    subject = [x[1].copy() for x in inputs], [x[1].copy() for x in states]
    seen = set()
    for row in range(B):
        for others in (1, 1e4, np.inf, np.nan):
            changed = [[x * np.asarray(others, x.dtype) for x in arrays] for arrays in (inputs, states)]
            for arrays, mine in zip(changed, subject, strict=True):
                for x, y in zip(arrays, mine, strict=True):
                    x[row] = y
            out, after = runner.run_step(changed[0], tuple(changed[1]))
            seen.add(b"".join(x[row].tobytes() for x in [out, *after]))
    assert len(seen) == 1


def test_a_chunk_is_one_token_after_the_other(runner: Runner) -> None:
    inputs, state = runner.inputs(T), runner.state()
    out, after = runner.run_chunk(inputs, state, T)
    states = tuple(np.stack([x] * B) for x in state)
    for t in range(T):
        found, stepped = runner.run_step([np.stack([x[t]] * B) for x in inputs], states)
        states = tuple(stepped)
        np.testing.assert_allclose(found[0], out[t], rtol=2e-4, atol=2e-4)
    for x, y in zip(states, after, strict=True):
        np.testing.assert_allclose(x[0].astype(np.float32), y.astype(np.float32), rtol=2e-4, atol=2e-4)
