"""Layers that see a window only: which tokens that is, which blocks are visited, what a config says of it, contexts that shift."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.attention import PagedCache, paged_attend, table_width
from jaxkv.models import ModelError, dense_attend, inspect_checkpoint
from jaxkv.models.config import Rope
from jaxkv.models.decoder import Decoder
from jaxkv.models.layers import rope_angles, rope_frequencies, rotate
from jaxkv.models.read_config import read_config
from jaxkv.pool import PoolLayout
from jaxkv.request import SamplingParams
from jaxkv.work_list import list_work
from tests.cpu import tiny
from tests.cpu.checkpoints import FIXTURES, fixture_copy

H, K, D, MAX_LEN = 4, 2, 8, 256
LAYOUT = PoolLayout(1, 80, 16, K, D, "float32", "float32")
SCALE = D**-0.5


def tokens(length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(length)
    q, k, v = (rng.standard_normal((length, heads, D)).astype(np.float32) for heads in (H, K, K))
    return q, k, v


def slowly(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int) -> np.ndarray:
    """One token and one head at a time, in float64."""
    out = np.zeros_like(q)
    for t in range(len(q)):
        for h in range(H):
            seen = slice(max(0, t - window + 1), t + 1)
            score = k[seen, h // 2].astype(np.float64) @ q[t, h] * SCALE
            weight = np.exp(score - score.max())
            out[t, h] = weight / weight.sum() @ v[seen, h // 2]
    return out


@partial(jax.jit, static_argnums=6)
def run(pool: Any, table: Any, positions: Any, valid: Any, qkv: Any, other: Any, window: int | None) -> tuple[Any, Any]:
    """A layer with the window, after one without whose lists and room must not get in its way."""
    attend = paged_attend(LAYOUT, table, positions, valid)
    _, cache = attend(0, *other, PagedCache(pool), scale=SCALE)
    out, cache = attend(0, *qkv, cache, scale=SCALE, window=window)
    return out, cache.pool


class Row:
    """One sequence in a pool of garbage, among two others of other lengths."""

    def __init__(self, length: int, seed: int = 0) -> None:
        rng = np.random.default_rng([length, seed])
        shape = (LAYOUT.num_pages + 1, *LAYOUT.page_shape)
        self.pool: Any = [tuple(jnp.asarray(rng.standard_normal(shape).astype(np.float32) * 9) for _ in range(2))]
        self.table = (rng.permutation(48) + 1).reshape(3, 16).astype(np.int32)
        assert self.table.shape[1] == table_width(MAX_LEN, 16)
        self.rng, self.qkv = rng, tokens(length)

    def prefill(self, cuts: list[int], width: int, window: int) -> np.ndarray:
        found, (q, k, v) = [], self.qkv
        for start, end in zip(cuts, [*cuts[1:], len(q)], strict=True):
            n = end - start
            padded = [np.concatenate([x[start:end], np.full((width - n, *x.shape[1:]), 3.0, np.float32)]) for x in (q, k, v)]
            positions = np.zeros((1, width), np.int32)
            positions[0, :n] = np.arange(start, end)
            out, self.pool = run(self.pool, self.table[:1], positions, np.arange(width)[None] < n, padded, padded, window)
            assert bool(jnp.isfinite(out).all())
            found.append(np.asarray(out)[:n])
        return np.concatenate(found)

    def decode(self, window: int, others: tuple[int | None, ...]) -> np.ndarray:
        """The last token, the others being there; `others` are the positions of the neighbours."""
        q, k, v = self.qkv
        self.prefill([0], MAX_LEN, window)
        positions = np.array([[len(q) - 1], *([at or 0] for at in others)], np.int32)
        valid = np.array([[True], *([at is not None] for at in others)])
        batch = [np.concatenate([x[-1:], self.rng.standard_normal((2, *x.shape[1:])).astype(np.float32)]) for x in (q, k, v)]
        out, _ = run(self.pool, self.table, positions, valid, batch, batch, window)
        assert bool(jnp.isfinite(out).all())
        return np.asarray(out)[0]


@pytest.mark.parametrize("window", [1, 16, 70])
def test_dense_attention_sees_the_token_itself_and_as_many_before_it_as_make_the_window(window: int) -> None:
    q, k, v = tokens(90)
    out, _ = dense_attend(0, jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), None, scale=SCALE, window=window)
    np.testing.assert_allclose(out, slowly(q, k, v, window), atol=2e-6)


@pytest.mark.parametrize("window", [1, 16, 63, 64, 65, 300])
def test_a_prompt_and_its_next_token_see_the_same_through_pages(window: int) -> None:
    expected = slowly(*tokens(200), window)
    np.testing.assert_allclose(Row(200).prefill([0, 64, 128, 192], 64, window), expected, atol=2e-6)
    np.testing.assert_allclose(Row(200).decode(window, (None, 250)), expected[-1], atol=2e-6)


@pytest.mark.parametrize("window", [16, 70])
def test_no_bit_depends_on_cuts_neighbours_or_what_lies_outside_the_window(window: int) -> None:
    plain = Row(200).prefill([0, 64, 128, 192], 64, window)
    for seed, cuts in enumerate([[0, 1, 64, 127, 190], [0, 37, 101, 165], [0, 8, 16, 80, 144]], 1):
        assert Row(200, seed).prefill(cuts, 64, window).tobytes() == plain.tobytes(), cuts
    alone = Row(200).decode(window, (None, None))
    for seed, others in enumerate([(3, 250), (250, 199), (64, None)], 1):
        assert Row(200, seed).decode(window, others).tobytes() == alone.tobytes(), others


def test_the_list_of_work_names_only_blocks_that_a_window_reaches_into() -> None:
    positions, active = jnp.array([130, 5, 64, 79]), jnp.array([True, True, False, True])
    work = list_work(positions, active, max_blocks=4, block=64, window=16)
    pairs = list(zip(work.rows[0].tolist(), work.blocks[0].tolist(), strict=True))
    assert pairs[:4] == [(0, 1), (0, 2), (1, 0), (3, 1)]  # 79 sees 64 to 79, all in block 1; 130 sees 115 to 130, in two
    assert (work.first.tolist(), work.num_blocks.tolist()) == ([0, 2, 3, 3], [2, 1, 0, 1])


def test_the_cost_of_a_window_does_not_grow_with_the_context() -> None:
    def turns(window: int | None) -> int:
        return int(list_work(jnp.full(4, 4000), jnp.ones(4, bool), max_blocks=64, block=64, window=window).num_turns)

    assert (turns(None), turns(512)) == (32, 5)  # 4 * 63 and 4 * 9 blocks, 8 in a turn


def test_windows_and_scales_are_read_from_every_familys_own_words() -> None:
    found = {name: inspect_checkpoint(FIXTURES / name).config for name in ("mistral", "gemma3", "gemma3_linear", "qwen3")}
    assert found["mistral"].windows == (16, 16, 16)
    assert [found[name].window for name in ("mistral", "gemma3", "qwen3")] == [16, None, None]  # what a pool need not keep
    assert found["gemma3"].windows == (16, 16, 16, None)
    assert found["gemma3_linear"].windows == (16, None, 16)
    assert found["qwen3"].windows == ()
    assert (found["gemma3"].rope_of(0), found["gemma3"].rope_of(3)) == (Rope(1e4), Rope(1e6))
    assert (found["gemma3_linear"].rope_of(0), found["gemma3_linear"].rope_of(1)) == (
        Rope(1e4),
        Rope(1e6, "linear", 8.0, original_max_position=512),
    )
    assert (found["gemma3"].scale, found["qwen3"].scale) == (24**-0.5, 32**-0.5)


def test_a_window_that_is_off_is_off() -> None:
    base = {name: json.loads((FIXTURES / name / "config.hub.json").read_text()) for name in ("mistral", "qwen2")}
    assert read_config({**base["mistral"], "sliding_window": None}).windows == ()
    qwen = {key: value for key, value in base["qwen2"].items() if key != "layer_types"}
    assert read_config({**qwen, "sliding_window": 32, "use_sliding_window": False, "max_window_layers": 1}).windows == ()
    assert read_config({**qwen, "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}).windows == (None, 32, 32)


def test_a_mistral_whose_file_says_nothing_of_a_window_has_that_of_its_class() -> None:
    data = json.loads((FIXTURES / "mistral" / "config.hub.json").read_text())
    del data["sliding_window"]
    assert read_config(data).windows == (4096, 4096, 4096)


def test_gemmas_own_files_leave_out_what_is_its_classs_default() -> None:
    hub = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    config = read_config({**hub, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}})
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size, config.max_position) == (8, 4, 256, 262_208, 131_072)
    assert [layer for layer in range(34) if config.window_of(layer) is None] == [5, 11, 17, 23, 29]
    assert (config.rope.kind, config.rope.theta, config.window_rope, config.scale) == ("linear", 1e6, Rope(1e4), 1 / 16)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "gemma3",
            {"layer_types": ["full_attention"]},
            r"layer_types must say 'full_attention' or 'sliding_attention' for each of 4 layers",
        ),
        (
            "gemma3",
            {"layer_types": ["full_attention", "linear_attention"] * 2},
            r"layer_types must say .* got \['full_attention', 'linear_",
        ),
        ("mistral", {"sliding_window": -5}, r"sliding_window must be a positive integer, got -5"),
        ("gemma3", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping = 30\.0 is not supported for 'gemma3_text', only None"),
        (
            "gemma3",
            {"hidden_activation": "relu"},
            r"hidden_activation = 'relu' is not supported for 'gemma3_text', only 'gelu_pytorch_tanh'",
        ),
        ("qwen3", {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, r"partial_rotary_factor = 0\.5 is not supported"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path: Path, name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        inspect_checkpoint(fixture_copy(name, tmp_path, **changes))


def test_the_keys_of_a_layer_move_by_that_layers_own_frequencies() -> None:
    config = inspect_checkpoint(FIXTURES / "gemma3_linear").config
    plain = jnp.asarray(np.random.default_rng(2).normal(size=(5, 2, 32)).astype(np.float32))
    for layer, rope in ((0, config.window_rope), (1, config.rope)):
        assert rope is not None
        there, here = (rotate(plain, *rope_angles(at + jnp.arange(5), rope_frequencies(rope, 32))) for at in (70, 30))
        np.testing.assert_allclose(Decoder.move_keys(config, layer, there, jnp.int32(-40)), here, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe"])
def test_contexts_shift_to_the_same_bytes_alone_and_crowded(name: str) -> None:
    """A context of 38 cells that drops 11 after its first 3, so past windows of 16, in a pool that holds two of four."""
    common: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True, "logprobs": 2, "context_shift": True, "context_len": 38, "n_keep": 3}
    params = [SamplingParams(**common, n_discard=11, temperature=0.0), SamplingParams(**common, n_discard=12, temperature=0.8, seed=7)] * 2
    prompts = [tiny.prompt(length) for length in (5, 20, 8, 33)]
    with tiny.engine(model__path=str(FIXTURES / name), pool__tokens=80) as made:
        alone = list(map(tiny.content, tiny.alone(made, prompts, params)))
        assert made.scheduler.counters.num_shifts > 0
        crowded = list(map(tiny.content, tiny.run(made, prompts, params)))
        assert made.scheduler.counters.num_parks > 0
    assert crowded == alone
