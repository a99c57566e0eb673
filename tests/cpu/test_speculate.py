"""Speculation on the engine: whatever is guessed, and however much of it is true, the bytes are those of an engine that takes no guess."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxkv.calibrate import calibrate
from jaxkv.engine import Engine
from jaxkv.errors import ConfigError
from jaxkv.live import Handle, Live
from jaxkv.observe.programs import list_programs
from jaxkv.request import Completion, SamplingParams
from jaxkv.speculate.speculation import NgramDrafter, Speculation
from tests.cpu import tiny
from tests.cpu.test_engine_constraints import give_bytes, prompts, speaking, wishes
from tests.cpu.test_engine_faults import break_once

NUM_DRAFT = 3
LENGTHS = (5, 20, 8, 33, 13, 40)  # chunk is 8: below, across and at its edges
Answers = dict[tuple[int, ...], list[int]]


class Oracle:
    """Guesses what it was told, by the prompt; `spoils(seq_id, place)` says which guesses it gets wrong."""

    def __init__(self, answers: Answers, spoils: Callable[[int, int], bool] = lambda seq_id, place: False) -> None:
        self.answers, self.spoils = answers, spoils
        self.num_guessed = 0

    def guess(self, wanted: Mapping[int, int], live: Mapping[int, Live]) -> dict[int, list[int]]:
        return {seq_id: self._guess(live[seq_id], num) for seq_id, num in wanted.items()}

    def _guess(self, sequence: Live, num: int) -> list[int]:
        first = sequence.num_generated
        truth = self.answers[tuple(sequence.prompt.tolist())][first : first + num]
        self.num_guessed += len(truth)
        return [token ^ 1 if self.spoils(sequence.seq_id, first + i) else token for i, token in enumerate(truth)]


def at_random(seq_id: int, place: int) -> bool:
    """Whether a guess is wrong: about every third."""
    return bool(np.random.default_rng([seq_id % 7, place]).random() < 0.3)


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Six requests that need 329 tokens together where the pool holds 64: greedy, sampled, with every wish that a column must see."""
    common: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "logprobs": 3}
    params = [
        SamplingParams(temperature=0, **common),
        SamplingParams(temperature=0.8, seed=7, **common),
        SamplingParams(temperature=0, frequency_penalty=0.5, presence_penalty=0.2, repetition_penalty=1.1, **common),
        SamplingParams(temperature=0.8, seed=2**63 + 11, top_k=20, top_p=0.9, min_p=0.01, prompt_logprobs=2, **common),
        SamplingParams(temperature=1.2, seed=3, logit_bias={9: 4.0, 11: -100.0}, min_tokens=6, stop_token_ids=(40, 41), **common),
        SamplingParams(temperature=0.8, seed=7, frequency_penalty=0.7, repetition_penalty=1.3, **common),
    ]
    return [tiny.prompt(length) for length in LENGTHS], params


@pytest.fixture(scope="module", params=["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def made(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with tiny.engine(model__dtype=request.param, speculate__kind="ngram", speculate__num_draft=NUM_DRAFT) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(made: Engine) -> list[Completion]:
    """Each request alone, and without a guess."""
    reset(made, rejects=True)
    return tiny.alone(made, *requests())


def answers_of(completions: list[Completion]) -> Answers:
    return {tuple(prompt): completion.token_ids for prompt, completion in zip(requests()[0], completions, strict=True)}


def reset(made: Engine, drafter: Any = None, *, rejects: bool = False, **changes: Any) -> None:
    """The same engine with other guesses and other rules of who parks: the programs are the same."""
    tiny.renew(made, **changes)
    made.speculation = Speculation(drafter or NgramDrafter(), 1 + NUM_DRAFT, rejects=rejects)


def contents(completions: list[Completion]) -> list[Any]:
    return list(map(tiny.content, completions))


RULES = [
    pytest.param({}, id="crowded"),
    pytest.param({"park_every": 1}, id="parked at every step"),
    pytest.param({"park_every": 3, "host_budget_bytes": 0}, id="computed again every 3 tokens"),
    pytest.param({"park_seed": 1, "host_budget_bytes": 3000, "planner": False}, id="at random, with images for some, unplanned"),
]
SPOILS = [
    pytest.param(lambda seq_id, place: False, id="all true"),
    pytest.param(at_random, id="some true"),
    pytest.param(lambda seq_id, place: True, id="none true"),
]


@pytest.mark.parametrize("changes", RULES)
@pytest.mark.parametrize("spoils", SPOILS)
def test_every_request_equals_itself_alone_without_a_guess(
    made: Engine, expected: list[Completion], changes: dict[str, Any], spoils: Callable[[int, int], bool]
) -> None:
    prompts, params = requests()
    oracle = Oracle(answers_of(expected), spoils)
    reset(made, oracle, **changes)
    assert contents(tiny.run(made, prompts, params)) == contents(expected)
    assert contents(tiny.run(made, prompts[::-1], params[::-1])) == contents(expected[::-1])
    assert oracle.num_guessed > 100
    assert made.scheduler.counters.num_parks >= 4


def test_guesses_that_come_true_take_fewer_steps(made: Engine, expected: list[Completion]) -> None:
    prompts, params = requests()
    num_steps = {}
    for name, spoils in {"true": lambda seq_id, place: False, "untrue": lambda seq_id, place: True}.items():
        reset(made, Oracle(answers_of(expected), spoils))
        before = made.stats.num_decode_steps
        tiny.run(made, prompts[:1], params[:1])
        num_steps[name] = made.stats.num_decode_steps - before
    assert num_steps == {"true": 6, "untrue": 23}  # 23 tokens behind the prompt's own, 4 at a time


def test_looking_up_guesses_some_of_what_repeats_itself(made: Engine) -> None:
    prompt = tiny.prompt(6) * 4
    wish = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, logprobs=1)
    reset(made, rejects=True)
    expected, before = tiny.content(tiny.run(made, [prompt], [wish])[0]), made.stats.num_decode_steps
    reset(made)
    assert tiny.content(tiny.run(made, [prompt], [wish])[0]) == expected
    assert made.stats.num_decode_steps - before < 50


@pytest.mark.parametrize("which", [0, 2, 3])
def test_an_answer_may_end_at_every_column(made: Engine, expected: list[Completion], which: int) -> None:
    """By its length, by a stop token, and both ways with guesses that would go on."""
    prompts, params = requests()
    reset(made, Oracle(answers_of(expected)))
    for length in range(1, 10):
        by_length = tiny.run(made, [prompts[which]], [replace(params[which], max_tokens=length)])[0]
        assert (by_length.token_ids, by_length.finish_reason) == (expected[which].token_ids[:length], "length")
        token = expected[which].token_ids[length - 1]
        at = expected[which].token_ids.index(token) + 1
        by_token = tiny.run(made, [prompts[which]], [replace(params[which], stop_token_ids=(token,))])[0]
        assert (by_token.token_ids, by_token.finish_reason) == (expected[which].token_ids[:at], "stop")
        assert by_token.logprobs == (expected[which].logprobs or [])[:at]


@pytest.mark.parametrize("tokens", [60, 61, 62, 63, 64, 65])
def test_the_pools_last_cell_is_used_and_no_cell_behind_it(made: Engine, tokens: int) -> None:
    """A prompt of 40 in a pool of 64 may say 25 tokens: the last has no cell."""
    wish = SamplingParams(max_tokens=tokens - 40 + 1, temperature=0, ignore_eos=True, logprobs=0)
    prompt = tiny.prompt(40, seed=5)
    reset(made, rejects=True)
    expected = tiny.run(made, [prompt], [wish])[0]
    assert len(expected.token_ids) == min(25, tokens - 39)
    reset(made, Oracle({tuple(prompt): expected.token_ids + [7] * 4}))
    assert tiny.content(tiny.run(made, [prompt], [wish])[0]) == tiny.content(expected)


def test_what_the_cells_hold_does_not_depend_on_the_column_that_filled_them(made: Engine, expected: list[Completion]) -> None:
    """The pages of one answer that was made token by token, and four at a time: equal to the last bit, and after a replay again."""
    prompts, params = requests()
    found = []
    never, always = (lambda seq_id, place: False), (lambda seq_id, place: True)
    for spoils, is_lost in ((at_random, False), (always, False), (never, False), (at_random, True)):
        reset(made, Oracle(answers_of(expected), spoils))
        handle = made.submit(prompts[3], replace(params[3], cache_prompt=False))
        tiny.step_to(made, handle, 18)
        if is_lost:
            assert made.scheduler.replay(handle.seq_id, 0.0) == ""
            made.live(handle.seq_id).pause(0.0)  # type: ignore[union-attr]
            tiny.step_to(made, handle, 19)
        view = next(view for view in made.scheduler.snapshot().sequences if view.seq_id == handle.seq_id)
        assert view.num_cells >= 33 + 17
        found.append(cells(made, handle.seq_id, 33 + 17))
        handle.cancel()
        tiny.settle(made)
    for other in found[1:]:
        assert all(np.array_equal(one, two) for one, two in zip(found[0], other, strict=True))


def cells(made: Engine, seq_id: int, num: int) -> list[np.ndarray]:
    """The first cells of a resident sequence, in every layer."""
    pages, size = made.scheduler._books.sequences[seq_id].pages, made.parts.layout.page_size
    arrays = [np.array(array) for layer in made.parts.pool.pages for array in layer]
    return [np.stack([array[pages[at // size], :, at % size] for at in range(num)]) for array in arrays]


def test_a_caller_may_leave_at_any_token_of_a_step(made: Engine, expected: list[Completion]) -> None:
    prompts, params = requests()
    for num in range(1, 8):
        reset(made, Oracle(answers_of(expected)))

        def leave(handle: Handle, token: int, num: int = num) -> None:
            if len(handle.token_ids) == num:
                handle.cancel()

        handle = made.submit(prompts[0], params[0], on_token=leave)
        other = made.submit(prompts[1], params[1])
        assert (handle.result().finish_reason, len(handle.token_ids)) == ("cancelled", num)
        assert tiny.content(other.result()) == tiny.content(expected[1])
        tiny.settle(made)


def test_choices_and_contexts_that_shift_are_as_without_guesses(made: Engine) -> None:
    prompt = tiny.prompt(11)
    wishes = [
        SamplingParams(max_tokens=30, temperature=0.6, seed=4, n=3, ignore_eos=True, logprobs=1),
        SamplingParams(max_tokens=70, temperature=0, ignore_eos=True, logprobs=1, context_shift=True, context_len=27, n_discard=8),
        SamplingParams(max_tokens=40, temperature=0.3, seed=1, ignore_eos=True, repetition_penalty=1.2, context_shift=True, context_len=24),
        SamplingParams(max_tokens=12, temperature=0.9, seed=2, min_tokens=7, logprobs=1),
    ]
    reset(made, rejects=True)
    expected = [contents(group.result()) for group in [made.submit_group(prompt, wish) for wish in wishes]]
    tiny.settle(made)
    for changes in ({}, {"park_every": 2}, {"park_every": 2, "host_budget_bytes": 0}):
        reset(made, **changes)
        assert [contents(group.result()) for group in [made.submit_group(prompt, wish) for wish in wishes]] == expected
        tiny.settle(made)


@pytest.mark.slow
def test_answers_of_a_demanded_form_are_as_without_guesses() -> None:
    with speaking(speculate__kind="ngram", speculate__num_draft=NUM_DRAFT) as made:
        give_bytes(made)
        reset(made, rejects=True)
        expected = [contents(tiny.run(made, [p], [q])) for p, q in zip(prompts(), wishes(), strict=True)]
        for changes in ({}, {"park_every": 2}):
            reset(made, **changes)
            groups = [made.submit_group(p, q) for p, q in zip(prompts(), wishes(), strict=True)]
            assert [contents(group.result()) for group in groups] == expected
            tiny.settle(made)
        assert made.stats.num_draft_tokens > 50


MESH = """
from tests.cpu import tiny
from tests.cpu.test_speculate import requests

ENGINE = dict(model__path={path!r}, mesh__tensor=2, speculate__kind={kind!r}, speculate__num_draft=2)
with tiny.engine(debug__reject_drafts=True, **ENGINE) as made:
    alone = [tiny.content(c) for c in tiny.alone(made, *requests())]
with tiny.engine(debug__park_every=3, **ENGINE) as made:
    assert [tiny.content(c) for c in tiny.run(made, *requests())] == alone
    assert made.stats.num_draft_tokens > 20
print("exact")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("llama", "ngram"), ("qwen3_5", "mtp")])
def test_two_devices_check_guesses_exactly(run_python: Callable[..., str], name: str, kind: str) -> None:
    assert run_python(MESH.format(path=str(tiny.LLAMA.parent / name), kind=kind), devices=2) == "exact\n"


@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_breaks_off_with_guesses_in_it_is_made_good(made: Engine, expected: list[Completion], late: bool) -> None:
    prompts, params = requests()
    reset(made, Oracle(answers_of(expected), at_random))
    before = made.stats.num_faults
    break_once(made.parts.programs.decode, "run", after=3, late=late)
    assert contents(tiny.run(made, prompts, params)) == contents(expected)
    assert made.stats.num_faults == before + 1


def test_the_simulators_costs_are_not_measured_with_guesses(made: Engine) -> None:
    with pytest.raises(ConfigError) as refused:
        calibrate(made)
    assert str(refused.value) == "speculate.kind: got ngram, and the simulator knows one token a step; take none"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"speculate__kind": "ngram"}, {"prefill", "verify"}),
        ({"speculate__kind": "draft", "speculate__draft_path": str(tiny.LLAMA)}, {"prefill", "verify", "draft", "draft_fill"}),
        ({"speculate__kind": "mtp", "model__path": str(tiny.LLAMA.parent / "qwen3_5")}, {"prefill", "verify"}),
    ],
)
def test_the_list_of_programs_has_the_one_that_checks(fields: dict[str, Any], names: set[str]) -> None:
    found = {program.name: program for program in list_programs(tiny.config(**fields)).programs}
    assert found.keys() >= names and "decode" not in found
    assert "int32[4,4]" in " ".join(shape for argument in found["verify"].arguments for shape in argument.shapes)
