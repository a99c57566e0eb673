"""The model's own draft head on the engine: as many guesses come true as recorded, and none changes a byte."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxkv.engine import Engine
from jaxkv.errors import ConfigError
from jaxkv.request import SamplingParams
from jaxkv.speculate.speculation import HeadSpeculation
from tests.cpu import tiny
from tests.cpu.checkpoints import FIXTURES, reference
from tests.cpu.test_speculate import contents, requests

NUM_DRAFT = 3
NAMES = ["qwen3_5 float32", "qwen3_5 bfloat16", "qwen3_5_moe float32"]


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in NAMES])
def made(request: pytest.FixtureRequest) -> Iterator[Engine]:
    name, dtype = request.param.split()
    with tiny.engine(
        model__path=str(FIXTURES / name), model__dtype=dtype, model__max_len=256, speculate__kind="mtp", speculate__num_draft=NUM_DRAFT
    ) as engine:
        yield engine


def reset(made: Engine, *, rejects: bool = False, **changes: Any) -> None:
    tiny.renew(made, **changes)
    made.speculation = HeadSpeculation(1 + NUM_DRAFT, made.parts.layout.page_size, rejects=rejects)


def accepted_rounds(made: Engine, prompt: list[int], num_tokens: int) -> tuple[list[int], list[int]]:
    """The answer, and how many guesses came true in each step."""
    rounds: list[int] = []
    speculation, columns = made.speculation, made.speculation.columns  # type: ignore[union-attr]

    def watched(row: Any, sampled: Any) -> Iterator[int]:
        found = list(columns(row, sampled))
        rounds.append(len(found) - 1)
        yield from found

    speculation.columns = watched  # type: ignore[union-attr, method-assign]
    done = tiny.run(made, [prompt], [SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)])[0]
    speculation.columns = columns  # type: ignore[union-attr, method-assign]
    return done.token_ids, rounds


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("qwen3_5", {"pool__page_size": 4, "debug__park_every": 3}),
        pytest.param("qwen3_5", {"pool__page_size": 32, "scheduler__prefill_chunk": 64}, marks=pytest.mark.slow),
        pytest.param(
            "qwen3_5", {"debug__park_every": 3, "scheduler__host_budget_mib": 0, "transfer__mode": "staged"}, marks=pytest.mark.slow
        ),
        pytest.param("qwen3_5_moe", {}, marks=pytest.mark.slow),
    ],
)
def test_as_many_guesses_come_true_in_every_step_as_recorded(name: str, fields: dict[str, Any]) -> None:
    """The same chains of three as transformers, for 32 tokens behind prompts of 7 and 83, whatever the pages, chunks and parks."""
    expected = reference(name)
    sizes = {"pool__tokens": 256, "model__max_len": 256, "model__path": str(FIXTURES / name), "model__dtype": "float32"}
    with tiny.engine(**{**sizes, "speculate__kind": "mtp", "speculate__num_draft": NUM_DRAFT, **fields}) as made:
        for i in (0, 1):
            tokens, rounds = accepted_rounds(made, expected[f"input_ids_{i}"].tolist(), 32)
            assert tokens == expected[f"greedy_{i}"].tolist()
            recorded = expected[f"mtp_accept3_{i}"].tolist()  # as far as there are tokens for all three
            assert rounds[: len(recorded)] == recorded


def mixed(made: Engine) -> tuple[list[list[int]], list[SamplingParams]]:
    """The requests that are asked everywhere, and two of the prompt at which the head is known to be right."""
    prompts, params = requests()
    known = reference(Path(made.config.model.path).name)["input_ids_0"].tolist()
    return [*prompts, known, known], [*params, *[SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (32, 27)]]


@pytest.fixture(scope="module")
def expected(made: Engine) -> list[Any]:
    reset(made, rejects=True)
    return contents(tiny.alone(made, *mixed(made)))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="crowded"),
        pytest.param({"park_every": 1}, id="parked at every step"),
        pytest.param({"park_every": 3, "host_budget_bytes": 0}, id="computed again every 3 tokens"),
    ],
)
def test_every_request_equals_itself_alone_without_a_guess(made: Engine, expected: list[Any], changes: dict[str, Any]) -> None:
    reset(made, **changes)
    before = made.stats.num_draft_tokens_accepted
    assert contents(tiny.run(made, *mixed(made))) == expected
    assert made.stats.num_draft_tokens_accepted > before + 5


def test_choices_begin_together_with_what_the_head_has_seen_and_say_what_they_say_one_by_one(made: Engine) -> None:
    """Six of which two have no row when the first token of all is drawn."""
    reset(made)
    prompt, params = tiny.prompt(45), SamplingParams(n=6, max_tokens=12, temperature=0.9, seed=5, ignore_eos=True)
    together = [done.token_ids for done in made.submit_group(prompt, params).result()]
    tiny.settle(made)
    assert made.scheduler.counters.num_forks == 5
    assert together == [made.submit(prompt, replace(params, n=1), choice=choice).result().token_ids for choice in range(6)]
    tiny.settle(made)


def test_a_park_in_the_midst_of_a_prompt_keeps_what_the_head_has_seen_of_it(made: Engine) -> None:
    prompt = tiny.prompt(40)
    wish = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    reset(made)
    tiny.run(made, [prompt], [wish])
    found = []
    for is_parked in (False, True):
        reset(made)
        before = made.stats.num_draft_tokens_accepted
        handle = made.submit(prompt, wish)
        for _ in range(2):
            made.step()
        if is_parked:
            assert made.scheduler.park(handle.seq_id) == ""
        found.append((handle.result().token_ids, made.stats.num_draft_tokens_accepted - before))
        tiny.settle(made)
    assert made.scheduler.counters.num_parks == 1
    assert found[0] == found[1]


def test_a_model_without_a_head_cannot_ask_it() -> None:
    with pytest.raises(ConfigError) as refused, tiny.engine(speculate__kind="mtp"):
        pass
    assert str(refused.value) == (
        f"speculate.kind: got mtp, but {tiny.LLAMA} has no draft head; take ngram or none, or a Hugging Face folder of Qwen3-Next, "
        "Qwen3.5 or Qwen3.6 with tensors named mtp.*"
    )


def test_the_heads_layer_is_part_of_every_page(made: Engine) -> None:
    layout = made.parts.layout
    assert layout.num_layers == 2  # one of attention, and the head's
    assert len(made.parts.pool.pages) == 2 and np.array(made.parts.pool.pages[1][0]).any()
