"""A small model that guesses on the engine: beside the pool, told again after every park, and never a byte's difference."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxkv.engine import Engine
from jaxkv.errors import ConfigError
from jaxkv.models import CheckpointInfo, inspect_checkpoint
from jaxkv.request import SamplingParams
from jaxkv.speculate.small import check_pair, check_tokenizers
from jaxkv.speculate.small_speculation import SmallSpeculation
from tests.cpu import tiny
from tests.cpu.checkpoints import FIXTURES, llama_copy
from tests.cpu.test_models_tokenizer import TOKENS
from tests.cpu.test_models_tokenizer import tiny as tokenizer
from tests.cpu.test_speculate import contents, requests

NUM_DRAFT = 3
GUESSES = {"speculate__kind": "draft", "speculate__num_draft": NUM_DRAFT}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen3")])
def made(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The model guesses for itself, which is always right where the likeliest token is taken; or another does, which hardly ever is."""
    with tiny.engine(speculate__draft_path=str(FIXTURES / request.param), **GUESSES) as engine:
        yield engine


def reset(made: Engine, *, rejects: bool = False, **changes: Any) -> None:
    assert made.parts.small is not None
    tiny.renew(made, **changes)
    made.speculation = SmallSpeculation(made.parts.small, 1 + NUM_DRAFT, made.parts.shapes.chunk, rejects=rejects)


@pytest.fixture(scope="module")
def expected(made: Engine) -> list[Any]:
    reset(made, rejects=True)
    return contents(tiny.alone(made, *requests()))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="crowded"),
        pytest.param({"park_every": 5}, id="parked every 5 tokens"),
        pytest.param({"park_every": 3, "host_budget_bytes": 0}, id="computed again every 3 tokens"),
    ],
)
def test_every_request_equals_itself_alone_without_a_guess(made: Engine, expected: list[Any], changes: dict[str, Any]) -> None:
    reset(made, **changes)
    before = made.stats.num_draft_tokens
    assert contents(tiny.run(made, *requests())) == expected
    assert made.stats.num_draft_tokens > before


def rounds(made: Engine, parks_at: int | None = None) -> tuple[int, int, int]:
    """Steps, guesses checked and guesses true of one greedy answer of 40 tokens."""
    stats = made.stats
    before = stats.num_row_steps, stats.num_draft_tokens, stats.num_draft_tokens_accepted
    handle = made.submit(tiny.prompt(20), SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    while not handle.done:
        made.step()
        if parks_at is not None and len(handle.token_ids) >= parks_at:
            parks_at = None
            assert made.scheduler.park(handle.seq_id) == ""
    tiny.settle(made)
    after = stats.num_row_steps, stats.num_draft_tokens, stats.num_draft_tokens_accepted
    return after[0] - before[0], after[1] - before[1], after[2] - before[2]


def test_a_model_that_guesses_for_itself_is_right_before_and_after_a_park() -> None:
    with tiny.engine(speculate__draft_path=str(tiny.LLAMA), **GUESSES) as made:
        steps, checked, true = rounds(made)
        assert checked == true and steps < 14  # it is told of 20 tokens in two or three steps, then 4 tokens a step
        parked = rounds(made, parks_at=20)
        assert parked[1] == parked[2] and steps < parked[0] < steps + 10  # told of 40 tokens again


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"speculate__draft_path": str(FIXTURES / "mamba")},
            "speculate.draft_path: mamba keeps states, which are in no page; take a model of attention alone",
        ),
        (
            {"speculate__draft_path": str(tiny.LLAMA), "model__path": str(FIXTURES / "mamba")},
            "speculate.kind: got draft, but mamba has no pages to share with another; take ngram or none",
        ),
    ],
)
def test_a_model_that_cannot_guess_for_the_other_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused, tiny.engine(**GUESSES, **fields):
        pass
    assert str(refused.value) == message


def test_another_vocabulary_is_refused() -> None:
    target = inspect_checkpoint(tiny.LLAMA).config
    with pytest.raises(ConfigError) as refused:
        check_pair(replace(target, vocab_size=319), target)
    assert str(refused.value) == (
        "speculate.draft_path: its vocabulary has 319 tokens, that of model.path 320; take one with the same tokenizer"
    )


def test_another_tokenizer_is_refused_and_other_names_of_special_tokens_are_not(tmp_path: Path) -> None:
    def model(name: str, tokens: list[str]) -> CheckpointInfo:
        folder = tmp_path / name
        folder.mkdir()
        tokenizer(tokens=tokens, special=set(tokens[:3])).save(path := llama_copy(folder))
        return inspect_checkpoint(path)

    target = model("target", TOKENS)
    check_tokenizers(model("renamed", ["<s>", *TOKENS[1:]]), target)
    check_tokenizers(inspect_checkpoint(tiny.LLAMA), target)  # has none
    with pytest.raises(ConfigError) as refused:
        check_tokenizers(model("other", [*TOKENS[:-2], *TOKENS[:-3:-1]]), target)
    assert str(refused.value) == (
        "speculate.draft_path: its token 259 is another one than that of model.path; take a model with the same tokenizer"
    )
