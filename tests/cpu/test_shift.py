"""Contexts that shift on a real model: the rotation is the one of the formula, and bytes depend on nothing but the request."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.cells import decode, encode
from jaxkv.engine import Engine
from jaxkv.errors import ConfigError, RequestError
from jaxkv.models.config import Rope
from jaxkv.models.decoder import Decoder
from jaxkv.models.layers import rope_angles, rope_frequencies, rotate
from jaxkv.models.llama import Llama
from jaxkv.pool import PoolLayout, pool_sharding
from jaxkv.programs import compile_program, shift_recipes
from jaxkv.request import SamplingParams
from jaxkv.scheduler import ContextShift, Plan, Shift
from jaxkv.shifting import rotate_pages
from tests.cpu import tiny
from tests.cpu.checkpoints import LLAMA, load, one_device

LENGTHS = (5, 20, 8, 33)


def params(num: int | None = 64, **changes: Any) -> SamplingParams:
    common: dict[str, Any] = {"max_tokens": num, "ignore_eos": True, "logprobs": 2, "context_shift": True}
    return SamplingParams(**common | {"context_len": 38, "n_keep": 3, "n_discard": 11, "temperature": 0.0} | changes)


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Four requests of which three shift; alone each fits a pool of 64 tokens."""
    wishes = [
        params(),
        params(temperature=0.8, seed=7, context_len=40, n_keep=0, n_discard=None),
        params(frequency_penalty=0.5, presence_penalty=0.2, repetition_penalty=1.1, n_discard=None),
        SamplingParams(max_tokens=25, temperature=0.8, seed=9, ignore_eos=True, logprobs=2),
    ]
    return [tiny.prompt(length) for length in LENGTHS], wishes


# The rotation


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_keys_turned_back_are_the_keys_of_the_new_positions(dtype: str) -> None:
    """Against keys computed at the new positions, from the same unrotated ones. Twenty pages make two runs of sixteen."""
    shape = PoolLayout(3, 32, 4, 2, 16, dtype, "uint16" if dtype == "bfloat16" else dtype)
    model, mesh = load(LLAMA).model, one_device()
    program = compile_program("rotate", shift_recipes(model, shape, mesh)["rotate"], mesh)
    plain = np.random.default_rng(0).normal(size=(33 * 4, 2, 16)).astype(np.float32)
    freq = rope_frequencies(model.config.rope, 16)

    def keys_at(first: int) -> jax.Array:
        """Every page's cells at positions first, first + 1, ... in the order of the pages, [p, k, z, d]."""
        rotated = rotate(jnp.asarray(plain), *rope_angles(first + jnp.arange(33 * 4), freq))
        return encode(rotated.reshape(33, 4, 2, 16).transpose(0, 2, 1, 3), shape)

    values = encode(jnp.asarray(np.random.default_rng(1).normal(size=(33, 2, 4, 16)).astype(np.float32)), shape)
    before, after = np.asarray(keys_at(500)), np.asarray(decode(keys_at(500 - 24), shape))
    pool: Any = jax.device_put([(np.array(before), np.array(values)) for _ in range(3)], pool_sharding(mesh))
    pages = tuple(range(3, 23))
    moved = {5: 25, 22: 30}  # two pages are somebody else's too: they are copied
    shift = Shift(0, 4, 24, sources=pages, pages=tuple(moved.get(page, page) for page in pages))
    for keys, kept in rotate_pages(program.run, pool, shift, 32):
        found, close = np.asarray(decode(keys, shape)), {"float32": 1e-4, "bfloat16": 5e-2, "float16": 5e-3}[dtype]
        for source, target in zip(shift.sources, shift.pages, strict=True):
            np.testing.assert_allclose(found[target], after[source], atol=close)
            assert np.asarray(kept)[target].tobytes() == np.asarray(values)[source].tobytes()
        for page in set(range(33)) - set(shift.pages):
            assert np.asarray(keys)[page].tobytes() == before[page].tobytes()
            assert np.asarray(kept)[page].tobytes() == np.asarray(values)[page].tobytes()


@pytest.mark.parametrize(
    "rope", [Rope(), Rope(500.0, "linear", 4.0), Rope(10000.0, "llama3", 8.0, 1.0, 4.0, 32)], ids=["default", "linear", "llama3"]
)
def test_every_kind_of_rotary_embedding_moves_by_its_own_frequencies(rope: Rope) -> None:
    config = load(LLAMA).config
    moved_config = type(config)(**{**config.to_json(), "rope": rope})
    plain = jnp.asarray(np.random.default_rng(2).normal(size=(5, 2, 16)).astype(np.float32))
    freq = rope_frequencies(rope, 16)
    there, here = (rotate(plain, *rope_angles(at + jnp.arange(5), freq)) for at in (70, 30))
    moved = Llama.move_keys(moved_config, 0, there, jnp.int32(-40))
    np.testing.assert_allclose(moved, here, atol=1e-5)
    assert float(jnp.abs(there - here).max()) > 0.5


class Reference:
    """One sequence, one token at a time, with float64 keys that are turned by complex numbers (RoFormer, equation 12) and plain softmax."""

    def __init__(self, model: Any, shift: ContextShift) -> None:
        self.model, self.shift = model, shift
        self.keys: list[list[np.ndarray]] = [[] for _ in range(model.config.num_layers)]
        self.values: list[list[np.ndarray]] = [[] for _ in range(model.config.num_layers)]
        half = model.config.head_dim // 2
        self.freq = model.config.rope.theta ** (-np.arange(half) / half)

    def attend(self, layer: int, q: Any, k: Any, v: Any, cache: Any, *, scale: float, window: int | None = None) -> tuple[Any, Any]:
        self.keys[layer].append(np.asarray(k[0], np.float64))
        self.values[layer].append(np.asarray(v[0], np.float64))
        keys, values = np.stack(self.keys[layer]), np.stack(self.values[layer])
        group = q.shape[1] // keys.shape[1]
        score = np.einsum("hd,shd->hs", np.asarray(q[0], np.float64) * scale, keys.repeat(group, 1))
        weight = np.exp(score - score.max(-1, keepdims=True))
        out = np.einsum("hs,shd->hd", weight / weight.sum(-1, keepdims=True), values.repeat(group, 1))
        return jnp.asarray(out[None], jnp.float32), cache

    def turn_back(self, key: np.ndarray) -> np.ndarray:
        half = len(self.freq)
        turned = (key[:, :half] + 1j * key[:, half:]) * np.exp(-1j * self.shift.n_discard * self.freq)
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def feed(self, token: int) -> np.ndarray:
        """Log probabilities of the token after this one."""
        keep, gone = self.shift.n_keep, self.shift.n_keep + self.shift.n_discard
        if len(self.keys[0]) == self.shift.context_len:
            self.keys = [layer[:keep] + [self.turn_back(key) for key in layer[gone:]] for layer in self.keys]
            self.values = [layer[:keep] + layer[gone:] for layer in self.values]
        position = len(self.keys[0])
        hidden, _ = self.model(jnp.asarray([token], jnp.int32), jnp.asarray([position], jnp.int32), None, self.attend)
        return np.asarray(jax.nn.log_softmax(self.model.logits(hidden)[0]), np.float64)


def test_the_engine_meets_a_slow_reference_that_shifts_as_the_formula_says() -> None:
    with tiny.engine() as made:
        model = load(LLAMA).model
        prompt = tiny.prompt(10)
        answer = tiny.run(made, [prompt], [params(20, context_len=18, n_discard=5)])[0]
        assert made.scheduler.counters.num_shifts == 2
    reference = Reference(model, ContextShift(18, 4, 8))
    said = [*prompt, *answer.token_ids]
    found = [reference.feed(token) for token in said[:-1]][len(prompt) - 1 :]
    assert answer.logprobs is not None and len(found) == 20
    for entry, expected in zip(answer.logprobs, found, strict=True):
        assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-3)
        assert [value for _, value in entry.top] == pytest.approx([float(expected[token]) for token, _ in entry.top], abs=1e-3)


# The same bytes


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def undisturbed(request: pytest.FixtureRequest) -> tuple[str, list[object]]:
    """The answers, one request after another in an ample pool, never parked."""
    with tiny.engine(model__dtype=request.param, pool__tokens=512) as made:
        answers = tiny.alone(made, *requests())
        assert made.scheduler.counters.num_parks == 0
        assert made.scheduler.counters.num_shifts == 8
    assert [len(answer.token_ids) for answer in answers] == [64, 64, 64, 25]
    return request.param, list(map(tiny.content, answers))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"transfer__mode": "hold"},
        {"debug__park_every": 1},
        {"debug__park_every": 1, "transfer__mode": "hold"},
        {"debug__park_seed": 5, "debug__copy_delay_steps": 3},
        {"debug__planner": False},
        {"scheduler__host_budget_mib": 0},
        {"scheduler__host_budget_mib": 0, "debug__park_every": 9},
        {"pool__tokens": 40, "scheduler__margin_steps": 0},
    ],
    ids=lambda settings: ", ".join(f"{name.partition('__')[2]}={value}" for name, value in settings.items()) or "crowded",
)
def test_shifted_answers_are_the_same_in_any_pool_beside_anybody(undisturbed: tuple[str, list[object]], settings: dict[str, Any]) -> None:
    dtype, expected = undisturbed
    prompts, wishes = requests()
    if settings.get("pool__tokens") == 40:  # 33 + 25 - 1 tokens do not fit there
        prompts, wishes, expected = prompts[:3], wishes[:3], expected[:3]
    with tiny.engine(model__dtype=dtype, **settings) as made:
        answers = tiny.run(made, prompts, wishes)
        assert made.scheduler.counters.num_shifts == 8
        assert made.scheduler.counters.num_parks > 0
    assert list(map(tiny.content, answers)) == expected


def test_siblings_whose_contexts_shift_answer_as_if_alone() -> None:
    """The first to shift copies the prompt pages that the others hold; the last turns them where they are."""
    prompts = [tiny.prompt(30)] * 3
    wishes = [params(40, temperature=0.9, seed=seed, n_keep=0, n_discard=8) for seed in range(3)]
    num_copied = 0

    class Watch:
        def on_plan(self, engine: Engine, plan: Plan, now: float) -> None:
            nonlocal num_copied
            for shift in plan.shifts:
                num_copied += sum(source != page for source, page in zip(shift.sources, shift.pages, strict=True))

    with tiny.engine(pool__tokens=512) as made:
        expected = list(map(tiny.content, tiny.alone(made, prompts, wishes)))
        assert made.scheduler.counters.num_shifts == 12
        made.observers.add(Watch())
        assert list(map(tiny.content, tiny.run(made, prompts, wishes))) == expected
        assert num_copied > 0
        assert made.scheduler.counters.num_parks == 0


def test_penalties_look_at_what_the_context_holds() -> None:
    """A context shorter than what was said: with the whole text in view the history would not even fit its array of 128 tokens."""
    wish = params(300, repetition_penalty=1.3, frequency_penalty=0.4)
    with tiny.engine() as made:
        plain = tiny.run(made, [tiny.prompt(6)], [wish])[0]
        assert len(plain.token_ids) == 300
        handle = made.submit(tiny.prompt(6), wish)
        tiny.step_to(made, handle, 200)
        live = made.sequences[handle.seq_id]
        said = [*tiny.prompt(6), *handle.token_ids]
        assert live.num_dropped == 14 * 12
        assert live.context == [*said[:4], *said[4 + 14 * 12 :]]
        assert live.prompt_in_context == 4
        handle.cancel()


def test_without_max_tokens_it_goes_on_until_it_is_cancelled() -> None:
    with tiny.engine() as made:
        handle = made.submit(tiny.prompt(6), params(None))
        assert handle.will_truncate_at is None
        tiny.step_to(made, handle, 400)
        handle.cancel()
        assert handle.completion is not None and handle.completion.finish_reason == "cancelled"


@pytest.mark.parametrize(("num", "tokens"), [(2, 64), (3, 96)])
def test_generations_without_end_take_turns_on_a_real_model_and_all_finish_as_if_alone(num: int, tokens: int) -> None:
    """Each wants 38 cells for 200 tokens and never lets go by itself: whoever is away comes back only because another makes way."""
    prompts, wishes = [tiny.prompt(8, seed) for seed in range(num)], [params(200, temperature=0.8, seed=seed) for seed in range(num)]
    with tiny.engine(pool__tokens=tokens, scheduler__rotate_after_s=0.02) as made:
        expected = list(map(tiny.content, tiny.alone(made, prompts, wishes)))
        assert (made.scheduler.counters.num_parks, made.scheduler.counters.num_rotations) == (0, 0)
        assert list(map(tiny.content, tiny.run(made, prompts, wishes))) == expected
        counters = made.scheduler.counters
        assert counters.num_rotations > 0
        assert counters.num_shifts == 2 * num * 15


# What is refused


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    with tiny.engine() as made:
        yield made


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_len": None}, "context_len: got 128, and the pool holds 64 tokens: lower it, or raise pool.tokens"),
        ({"context_len": 129}, "context_len: got 129, allowed: 1 to 128, which is model.max_len"),
        (
            {"n_keep": 33},
            "n_keep: got 36 tokens in whole pages of 4, which leaves none to drop of context_len 38; allowed: 0 to 32",
        ),
        (
            {"n_discard": 37},
            "n_discard: got 40 tokens in whole pages of 4, allowed: 4 to 36, what fills pages in context_len 38 after 0 kept tokens",
        ),
        ({"context_len": 12}, "the prompt has 20 tokens, and context_len allows 12: shorten the prompt or raise context_len"),
    ],
)
def test_a_shift_that_cannot_be_had_is_refused_at_the_door(shared: Engine, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        shared.submit(tiny.prompt(20), params(**{"n_keep": 0, "n_discard": 4} | changes))
    assert str(caught.value) == message


def test_a_configuration_whose_contexts_could_never_shift_is_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxkv.startup.load_checkpoint", None)
    with pytest.raises(ConfigError) as caught:
        Engine(tiny.config(request__context_shift=True))
    assert str(caught.value) == "request.context_len: got 128, and the pool holds 64 tokens: lower it, or raise pool.tokens"
    monkeypatch.delattr(Decoder, "move_keys")
    with pytest.raises(ConfigError) as caught:
        Engine(tiny.config(request__context_shift=True, request__context_len=32))
    assert str(caught.value) == (
        "request.context_shift: got true, but this model's keys do not simply turn with their position, so they cannot be moved; "
        "set it to false"
    )


def test_a_model_that_cannot_shift_serves_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Decoder, "move_keys")
    with tiny.engine() as made:
        with pytest.raises(RequestError, match=r"context_shift: got true, but this model's keys .* cannot be moved; leave it out"):
            made.submit(tiny.prompt(5), params())
        assert [program.name for program in made.parts.programs.all()] == ["prefill", "decode", "gather", "scatter", "copy"]
        assert len(tiny.run(made, [tiny.prompt(5)], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3


def test_a_shift_that_fails_ends_that_sequence_alone(shared: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tiny.content(tiny.run(shared, [tiny.prompt(8)], [SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)])[0])
    rotate_program = shared.parts.programs.rotate
    assert rotate_program is not None
    plain = rotate_program.run

    def broken(*_: Any) -> Any:
        raise RuntimeError("no device")

    handles = [
        shared.submit(tiny.prompt(30), params(20)),
        shared.submit(tiny.prompt(8), SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)),
    ]
    object.__setattr__(rotate_program, "run", broken)
    try:
        failed, other = (handle.result() for handle in handles)
    finally:
        object.__setattr__(rotate_program, "run", plain)
    assert (failed.finish_reason, failed.error) == ("error", "a step broke off: RuntimeError: no device")
    assert len(failed.token_ids) == 9
    assert tiny.content(other) == expected
    tiny.settle(shared)


def test_the_default_drops_half_of_what_is_not_kept(shared: Engine) -> None:
    handle = shared.submit(tiny.prompt(20), params(60, context_len=64, n_keep=0, n_discard=None))
    assert shared.sequences[handle.seq_id].shift == ContextShift(64, 0, 32)
    handle.result()
    assert math.isclose(handle.completion.logprobs[0].logprob, handle.completion.logprobs[0].top[0][1])  # type: ignore[union-attr, index]
    tiny.settle(shared)
