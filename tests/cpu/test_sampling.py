"""The sampler against NumPy: every stage, their order, the draws, and who may not disturb whom."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.masks import allow
from jaxkv.sampling import Knobs, Sampled, first_best, keep_top_k, keep_top_p, neutral_knobs, sample, sample_first

V = 64
HISTORY, ROWS = 24, 512
run_sample = jax.jit(sample)
run_top_k = jax.jit(keep_top_k)
run_top_p = jax.jit(keep_top_p)


def rows(count: int, **fields: Any) -> Knobs:
    """Neutral knobs with fields replaced, a scalar meaning every row."""
    knobs = neutral_knobs(count, HISTORY, V)._asdict()
    for name, value in fields.items():
        knobs[name] = np.broadcast_to(np.asarray(value, knobs[name].dtype), knobs[name].shape).copy()
    return Knobs(**knobs)


def biased(knobs: Knobs, row: int, biases: dict[int, float]) -> Knobs:
    ids, bias = knobs.bias_ids.copy(), knobs.bias.copy()
    ids[row, : len(biases)], bias[row, : len(biases)] = list(biases), list(biases.values())
    return knobs._replace(bias_ids=ids, bias=bias)


def run(logits: np.ndarray, knobs: Knobs) -> Sampled:
    """Sample in one compiled shape: neutral rows below, impossible tokens beyond the vocabulary."""
    count, vocab = logits.shape
    assert count <= ROWS
    padded = np.full((ROWS, V), -np.inf, np.float32)
    padded[:count, :vocab], padded[count:] = logits, 0.0
    spare = rows(ROWS - count)
    wide: list[Any] = [np.concatenate([a, b]) for a, b in zip(knobs, spare, strict=True)]
    sampled: list[Any] = [np.asarray(x)[:count] for x in run_sample(padded, Knobs(*wide))]
    return Sampled(*sampled)


def random_logits(count: int, seed: int = 0, vocab: int = V) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((count, vocab)) * 3).astype(np.float32)


# The reference: one row, one stage after the other, sorting as one would on paper


def noise(seed: Any, choice: int, num_generated: int, vocab: int) -> np.ndarray:
    """The documented key: seed, then choice, then tokens so far."""
    key = jax.random.wrap_key_data(jnp.array(seed, jnp.uint32), impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, choice), num_generated)
    return np.asarray(jax.random.gumbel(key, (vocab,), np.float32))


def kept_by_top_p(x: np.ndarray, p: float) -> np.ndarray:
    """True for the shortest run of the sorted tokens whose probability reaches p, and for ties with its last."""
    weight = np.exp(x.astype(np.float64) - x.max())
    order = np.argsort(-x, kind="stable")
    reached = np.cumsum(weight[order]) >= p * weight.sum()
    last = order[int(np.argmax(reached))]
    return x >= x[last]


def kept_by_top_k(x: np.ndarray, k: int) -> np.ndarray:
    return np.ones(x.shape, bool) if k == 0 or k >= len(x) else x >= np.sort(x)[-k]


def wished(logits: np.ndarray, knobs: Knobs, row: int) -> np.ndarray:
    """Penalties and bias."""
    x = logits.astype(np.float64).copy()
    said = knobs.history[row, : knobs.history_len[row]].tolist()
    answered = said[knobs.prompt_len[row] :]
    for token in set(said):
        x[token] = x[token] / knobs.repetition[row] if x[token] > 0 else x[token] * knobs.repetition[row]
    for token in set(answered):
        x[token] -= answered.count(token) * knobs.frequency[row] + knobs.presence[row]
    for token, bias in zip(knobs.bias_ids[row], knobs.bias[row], strict=True):
        if token < len(x):
            x[token] += bias
    return x


def reference_token(logits: np.ndarray, knobs: Knobs, row: int) -> int:
    """Penalties, bias, temperature, min_p, top_k, top_p, draw."""
    x = wished(logits, knobs, row)
    if knobs.temperature[row] == 0:
        return int(x.argmax())
    x = x / knobs.temperature[row]
    allowed = np.exp(x - x.max()) >= knobs.min_p[row]
    x = np.where(allowed, x, -np.inf)
    x = np.where(kept_by_top_k(x, int(knobs.top_k[row])), x, -np.inf)
    if knobs.top_p[row] < 1:
        x = np.where(kept_by_top_p(x, float(knobs.top_p[row])), x, -np.inf)
    seed = (int(knobs.seed[row, 0]), int(knobs.seed[row, 1]))
    return int((x + noise(seed, int(knobs.choice[row]), int(knobs.num_generated[row]), len(x))).argmax())


# Greedy, penalties, bias


def test_temperature_zero_takes_the_likeliest_and_of_equals_the_first() -> None:
    logits = random_logits(4)
    logits[1] = 0.0
    logits[2, [9, 40]] = 50.0
    assert run(logits, rows(4)).token.tolist() == [int(logits[0].argmax()), 0, 9, int(logits[3].argmax())]


def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_answer() -> None:
    logits = np.zeros((2, V), np.float32)
    logits[:, 5], logits[:, 6], logits[:, 7] = 4.0, 2.1, -1.0
    knobs = rows(2, repetition=[2.0, 1.0], prompt_len=1, history_len=2)
    knobs.history[:, :3] = [5, 7, 6]  # 5 is the prompt, 7 the answer; 6 lies beyond the history's length
    assert run(logits, knobs).token.tolist() == [6, 5]  # 4 / 2 < 2.1
    negative = np.full((2, V), -2.0, np.float32)
    negative[:, 7] = -1.5  # times 2 is -3
    assert run(negative, knobs).token.tolist() == [0, 7]


def test_presence_counts_once_and_frequency_every_time_and_neither_the_prompt() -> None:
    logits = np.zeros((3, V), np.float32)
    logits[:, 5], logits[:, 6], logits[:, 7] = 3.0, 2.0, 1.0
    knobs = rows(3, presence=[1.5, 0, 0], frequency=[0, 0.6, 0.4], prompt_len=2, history_len=5)
    knobs.history[:, :5] = [6, 6, 5, 5, 9]  # the answer: 5, 5, 9
    # 5 falls to 1.5 (once), to 1.8 (twice 0.6), to 2.2 (twice 0.4); 6, being prompt only, stays at 2
    assert run(logits, knobs).token.tolist() == [6, 6, 5]


def test_bias_adds_to_its_ids_and_an_infinite_one_bans_or_none_at_all() -> None:
    logits = np.zeros((3, V), np.float32)
    logits[:, 5] = 3.0
    knobs = biased(biased(rows(3), 0, {8: 3.5}), 1, {5: -np.inf, 63: 0.5})
    assert run(logits, knobs).token.tolist() == [8, 63, 5]


# The sets that stay


def extreme_rows() -> np.ndarray:
    rng = np.random.default_rng(5)
    logits = np.zeros((8, V), np.float32)
    logits[1, 3] = 1e4
    logits[2] = -1e4
    logits[2, 60] = 1e4
    logits[3] = np.linspace(-80, 80, V)
    logits[4] = rng.standard_normal(V) * 1e-6
    logits[5, 10:] = -np.inf
    logits[6] = rng.integers(-3, 3, V)
    logits[7] = rng.standard_normal(V) * 1e30
    return logits


def many_rows() -> np.ndarray:
    """248 random rows, flat to peaked, and eight extreme ones."""
    scale = np.geomspace(0.01, 30, 248, dtype=np.float32)[:, None]
    return np.concatenate([random_logits(248, 3) * scale, extreme_rows()]).astype(np.float32)


@pytest.mark.parametrize("k", [0, 1, 2, 7, 63, 64, 1000])
def test_top_k_keeps_what_sorting_would_and_ties_with_the_last(k: int) -> None:
    x = many_rows()
    x[:50, 20:40] = x[:50, 20:21]  # twenty equal logits each
    kept = np.asarray(run_top_k(x, np.full(len(x), k, np.int32)))
    for i, row in enumerate(x):
        expected = np.where(kept_by_top_k(row, k), row, -np.inf)
        np.testing.assert_array_equal(kept[i], expected, err_msg=str(i))


def test_top_k_keeps_more_than_k_where_they_are_equal() -> None:
    x = np.array([[1, 5, 5, 3, 5, 0]], np.float32)
    assert np.isfinite(run_top_k(x, np.array([2], np.int32))).tolist() == [[False, True, True, False, True, False]]


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9, 0.99, 0.999])
def test_top_p_keeps_exactly_the_set_that_sorting_finds(p: float) -> None:
    x = many_rows()
    kept = np.isfinite(run_top_p(x, np.full(len(x), p, np.float32)))
    compared = 0
    for i, row in enumerate(x):
        expected = kept_by_top_p(row, p) & np.isfinite(row)
        weight = np.exp(row.astype(np.float64) - row.max())
        edges = [weight[row > row[expected].min()].sum(), weight[expected].sum()]  # without and with the last one
        if min(abs(edge - p * weight.sum()) for edge in edges) < 1e-5 * weight.sum() and edges[0] > 0:
            continue  # float32 may see this edge on the other side
        compared += 1
        assert kept[i].tolist() == expected.tolist(), (i, p)
    assert compared > 240


def test_top_p_of_one_keeps_all_and_of_nearly_nothing_the_likeliest() -> None:
    x = random_logits(3, 8)
    kept = np.asarray(run_top_p(x, np.array([1.0, 1e-30, 1e-44], np.float32)))  # the last is below the smallest normal number
    assert kept[0].tobytes() == x[0].tobytes()
    assert [np.flatnonzero(np.isfinite(row)).tolist() for row in kept[1:]] == [[int(row.argmax())] for row in x[1:]]


def test_min_p_keeps_tokens_at_least_that_share_as_likely_as_the_likeliest() -> None:
    probabilities = np.array([0.5, 0.26, 0.2, 0.04], np.float32)
    logits = np.tile(np.log(probabilities), (400, 1))
    for min_p, expected in ((0.5, {0, 1}), (1, {0}), (0, {0, 1, 2, 3})):
        knobs = rows(400, temperature=1, min_p=min_p, num_generated=np.arange(400))
        assert set(run(logits, knobs).token.tolist()) == expected


def test_a_tiny_temperature_is_greedy_and_never_a_token_out_of_nowhere() -> None:
    logits = random_logits(4, 9)
    knobs = rows(4, temperature=[1e-3, 1e-30, 1.2e-38, 3e-39])
    assert run(logits, knobs).token.tolist() == logits.argmax(-1).tolist()


# Masks


def masked(knobs: Knobs, row: int, *ids: int) -> Knobs:
    mask, is_masked = knobs.mask.copy(), np.array(knobs.is_masked)
    mask[row], is_masked[row] = 0, True
    allow(mask[row], np.array(ids))
    return knobs._replace(mask=mask, is_masked=is_masked)


def test_a_masked_row_draws_only_from_its_mask_before_any_threshold_and_the_others_keep_their_tokens() -> None:
    logits = random_logits(40, 13)
    knobs = rows(40, temperature=[0, 0.8] * 20, top_k=2, num_generated=np.arange(40))
    plain = run(logits, knobs)
    for row in range(0, 40, 3):
        knobs = masked(knobs, row, 1, 33, 34, 63)
    found = run(logits, knobs)
    for row in range(40):
        if row % 3:
            assert bits(found, row) == bits(plain, row)
            continue
        best = sorted((1, 33, 34, 63), key=lambda token: -logits[row, token])
        assert found.token[row] in (best[:1] if row % 2 == 0 else best[:2])
        assert found.logprob[row] == pytest.approx(log_softmax(logits[row])[found.token[row]], abs=1e-5)
    assert {int(found.token[row]) for row in range(0, 40, 3)} == {1, 33, 34}


def test_a_mask_is_stronger_than_any_bias_and_of_one_token_leaves_no_choice() -> None:
    knobs = rows(3, temperature=[0, 1, 1], repetition=1.5, presence=2, history_len=9, prompt_len=2)
    for row in range(3):
        knobs = masked(biased(knobs, row, {5: 100.0, 40: -100.0}), row, 40)
    assert run(random_logits(3, 14), knobs).token.tolist() == [40, 40, 40]


# All together, in order


def test_a_wish_of_one_greedy_row_counts_though_no_other_row_has_any() -> None:
    logits = random_logits(3)
    likeliest = logits.argmax(-1).tolist()
    other = (likeliest[1] + 7) % V
    wishes = {
        "mask": masked(rows(3), 1, other),
        "bias": biased(rows(3), 1, {other: 100.0}),
        "penalty": rows(3, repetition=[1, 100, 1], history=likeliest[1], history_len=[0, 1, 0]),
    }
    for name, knobs in wishes.items():
        found = run(logits, knobs).token.tolist()
        assert (found[0], found[2]) == (likeliest[0], likeliest[2]) and found[1] != likeliest[1], name
        assert name == "penalty" or found[1] == other


def random_knobs(count: int, seed: int) -> Knobs:
    rng = np.random.default_rng(seed)

    def some(values: np.ndarray, off: float) -> np.ndarray:
        return np.where(rng.random(count) < 0.5, values, off)

    knobs = rows(
        count,
        temperature=some(rng.uniform(0.3, 1.5, count), 0.8),
        top_p=some(rng.uniform(0.3, 0.98, count), 1.0),
        min_p=some(rng.uniform(0, 0.2, count), 0.0),
        presence=some(rng.uniform(-2, 2, count), 0.0),
        frequency=some(rng.uniform(-2, 2, count), 0.0),
        repetition=some(rng.uniform(0.8, 1.5, count), 1.0),
        top_k=some(rng.integers(1, 20, count), 0),
        choice=rng.integers(0, 4, count),
        num_generated=rng.integers(0, 1000, count),
        prompt_len=rng.integers(0, 12, count),
        history_len=rng.integers(12, HISTORY, count),
    )
    knobs.seed[:] = rng.integers(0, 2**32, (count, 2), np.uint32)
    knobs.history[:] = rng.integers(0, V, knobs.history.shape)
    for i in range(0, count, 3):
        knobs = biased(knobs, i, {int(t): float(b) for t, b in zip(rng.choice(V, 4, False), rng.uniform(-5, 5, 4), strict=True)})
    return knobs


def test_all_stages_in_the_documented_order_give_the_reference_token() -> None:
    logits, knobs = random_logits(200, 11), random_knobs(200, 12)
    found = run(logits, knobs).token.tolist()
    expected = [reference_token(logits[i], knobs, i) for i in range(200)]
    differing = [i for i in range(200) if found[i] != expected[i]]
    assert len(differing) <= 1, differing  # float32 against float64: at most one set whose edge falls between
    assert len(set(found)) > 20


def test_top_k_comes_before_top_p_which_then_sees_what_is_left() -> None:
    logits = np.tile(np.log(np.array([0.4, 0.35, 0.25], np.float32)), (300, 1))
    draws = partial(rows, 300, temperature=1, num_generated=np.arange(300))
    assert set(run(logits, draws(top_p=0.5)).token.tolist()) == {0, 1}
    assert set(run(logits, draws(top_p=0.5, top_k=2)).token.tolist()) == {0}  # 0.4 of 0.75 is 0.53: enough


def test_temperature_comes_before_min_p() -> None:
    logits = np.tile(np.log(np.array([0.6, 0.4], np.float32)), (300, 1))
    draws = partial(rows, 300, min_p=0.5, num_generated=np.arange(300))
    assert set(run(logits, draws(temperature=1)).token.tolist()) == {0, 1}  # 0.67 of the likeliest
    assert set(run(logits, draws(temperature=0.5)).token.tolist()) == {0}  # 0.67 squared is 0.44


# The distribution


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_draws_follow_the_softmax_at_their_temperature_and_not_at_another(temperature: float) -> None:
    vocab, count, turns = 12, ROWS, 60
    x = np.linspace(-1.5, 1.5, vocab)
    counts = np.zeros(vocab)
    for turn in range(turns):
        knobs = rows(count, temperature=temperature, num_generated=turn)
        knobs.seed[:, 1] = np.arange(count)  # neighbouring seeds and neighbouring positions must be independent too
        logits = np.tile(x.astype(np.float32), (count, 1))
        counts += np.bincount(run(logits, knobs).token, minlength=vocab)

    def expected(t: float) -> np.ndarray:
        weight = np.exp(x / t)
        return weight / weight.sum() * count * turns

    assert chi_square(counts, expected(temperature)) < 31.3  # 11 degrees of freedom: one in a thousand lies above
    assert chi_square(counts, expected(temperature * 1.1)) > 60


def test_top_p_renormalises_what_it_keeps() -> None:
    count, turns = ROWS, 20
    probabilities = np.array([0.4, 0.3, 0.2, 0.1])
    counts = np.zeros(4)
    for turn in range(turns):
        knobs = rows(count, temperature=1, top_p=0.65, num_generated=turn)
        knobs.seed[:, 0] = np.arange(count)
        counts += np.bincount(run(np.tile(np.log(probabilities).astype(np.float32), (count, 1)), knobs).token, minlength=4)
    assert counts[2:].tolist() == [0, 0]
    assert chi_square(counts[:2], np.array([4 / 7, 3 / 7]) * count * turns) < 10.8  # 1 degree of freedom


# Who may not disturb whom


def bits(sampled: Sampled, row: int) -> tuple[int, bytes]:
    return int(sampled.token[row]), sampled.logprob[row].tobytes()


LOUD = {
    "nobody": {},
    "greedy": {"temperature": 0.0},
    "penalties": {"presence": 1.0, "frequency": 0.5, "repetition": 1.3, "history_len": 9, "prompt_len": 3},
    "sets": {"temperature": 0.5, "top_k": 3, "top_p": 0.3, "min_p": 0.2},
    "logprobs": {"wants_top": True, "temperature": 1.7},
}


@pytest.mark.parametrize(
    "own", [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9, "top_k": 12, "min_p": 0.01}]
)
def test_a_row_keeps_its_bits_in_any_place_whatever_stages_its_neighbours_switch_on(own: dict[str, float]) -> None:
    target = random_logits(1, 20)[0]
    found = set()
    for seed, (name, wishes) in enumerate(LOUD.items()):
        for at in (0, 2, 3):
            logits = random_logits(4, 21 + seed)
            logits[at] = target
            values: dict[str, Any] = {field: np.full(4, value) for field, value in wishes.items()}
            mine = {"num_generated": 17, **own}
            for field in {*values, *mine}:
                default = getattr(rows(4), field)[0]
                values.setdefault(field, np.full(4, default, type(default)))
                values[field] = values[field].astype(float)
                values[field][at] = mine.get(field, default)
            knobs = rows(4, **values)
            knobs.seed[at] = (3, 4)
            if name == "penalties":
                knobs = biased(knobs, (at + 1) % 4, {5: 100.0})
            found.add(bits(run(logits, knobs), at))
    assert len(found) == 1


def draws_of(count: int = 48, **fields: Any) -> list[int]:
    """Tokens of one row at `count` positions, in a flat vocabulary: equal lists by chance are out of the question."""
    knobs = rows(count, temperature=1, num_generated=np.arange(count), **{k: v for k, v in fields.items() if k != "seed"})
    knobs.seed[:] = fields.get("seed", (0, 7))
    return run(np.zeros((count, V), np.float32), knobs).token.tolist()


def test_the_same_seed_at_the_same_position_is_the_same_token_in_any_row() -> None:
    knobs = rows(16, temperature=1, num_generated=5)
    knobs.seed[:] = (1, 2)
    assert len(set(run(np.zeros((16, V), np.float32), knobs).token.tolist())) == 1


def test_position_choice_and_both_halves_of_the_seed_each_change_the_draws() -> None:
    plain = draws_of()
    assert len(set(plain)) > 20
    others = [draws_of(choice=1), draws_of(seed=(0, 8)), draws_of(seed=(1, 7)), draws_of(seed=(2**31, 7)), draws_of(seed=(7, 0))]
    assert len({tuple(x) for x in [plain, *others]}) == 6
    assert draws_of() == plain


def test_draws_are_those_of_the_documented_key() -> None:
    expected = [int(noise((0, 7), 0, n, V).argmax()) for n in range(8)]
    assert draws_of()[:8] == expected


# Logprobs


def log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x.astype(np.float64) - x.max()
    return shifted - np.log(np.exp(shifted).sum())


def test_logprobs_are_the_models_own_before_any_wish_and_the_top_ones_best_first() -> None:
    logits = random_logits(6, 30)
    knobs = biased(rows(6, temperature=[0, 0.8, 1.5, 0, 0.3, 2], top_k=5, repetition=1.2, history_len=10, wants_top=True), 0, {4: 9.0})
    found = run(logits, knobs)
    assert found.top_ids.shape == (6, 20)
    for i, row in enumerate(logits):
        expected, order = log_softmax(row), np.argsort(-row, kind="stable")[:20]
        assert found.logprob[i] == pytest.approx(expected[found.token[i]], abs=1e-5)
        assert found.top_ids[i].tolist() == order.tolist()
        np.testing.assert_allclose(found.top_logprobs[i], expected[order], atol=1e-5)


def test_the_chosen_tokens_logprob_has_the_bits_that_the_top_list_shows() -> None:
    found = run(random_logits(4, 31), rows(4, wants_top=True))
    assert found.token.tolist() == found.top_ids[:, 0].tolist()
    assert found.logprob.tobytes() == found.top_logprobs[:, 0].tobytes()


def test_a_vocabulary_smaller_than_the_top_list_is_listed_whole() -> None:
    found = run_sample(random_logits(2, 32, vocab=5), rows(2, wants_top=True, bias_ids=5))
    assert found.top_ids.shape == (2, 5)
    assert sorted(found.top_ids[0].tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("vocab", [1, 5, 512, 513, 1500, 4096])
def test_the_best_token_is_the_first_of_the_largest(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    scores = rng.integers(0, 4, (6, vocab)).astype(np.float32)  # many ties
    scores[1] = -np.inf
    scores[2, vocab // 2 :] = -np.inf
    scores[3] = 0.0
    scores[4, -1] = 9.0
    found = np.asarray(jax.jit(first_best)(scores))
    assert found.tolist() == scores.argmax(-1).tolist()


def test_no_two_knobs_are_one_array() -> None:
    """What a request asks is written into them in place."""
    knobs = neutral_knobs(3, HISTORY, V)
    assert not any(np.shares_memory(one, other) for i, one in enumerate(knobs) for other in knobs[:i])


def test_first_draws_are_those_of_each_alone_however_many_there_are() -> None:
    run_first, one = jax.jit(sample_first), random_logits(1, seed=9)
    seeds, tops = [[0, n] for n in range(4)], [True, False, False, True]
    asked = rows(4, temperature=[0.0, 1.5, 0.7, 2.0], seed=seeds, choice=range(4), wants_top=tops)
    asked = biased(asked._replace(top_k=np.array([0, 9, 0, 5], np.int32)), 3, {int(one.argmax()): -50.0})
    for num in range(5):
        found = run_first(one, asked, np.int32(num))
        for row in range(4):
            alone = run_first(one, Knobs(*(np.roll(knob, -row, axis=0) for knob in asked)), np.int32(1))
            for now, then in zip(found, alone, strict=True):
                expected = np.asarray(then)[0] if row < num else np.zeros_like(np.asarray(then)[0])
                np.testing.assert_array_equal(np.asarray(now)[row], expected)
    assert len(set(np.asarray(found.token).tolist())) > 1
