"""Every family: its fixture's recorded logits and greedy ids, both spellings of its config, its bytes through an engine that parks."""

import json
from collections.abc import Iterator
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxkv.engine import Engine
from jaxkv.models import ModelError, dense_logits, inspect_checkpoint, save_converted
from jaxkv.models.read_config import read_config
from jaxkv.request import SamplingParams
from jaxkv.scheduler import Scheduler
from tests import exactness
from tests.cpu import tiny
from tests.cpu.checkpoints import FIXTURES, TOLERANCE, change_tensors, fixture_copy, load, reference, write_json

PAGED = ("qwen2", "qwen3", "qwen3_moe", "qwen3_moe_mixed", "mistral", "gemma3", "gemma3_linear")
RECURRENT = ("mamba", "mamba2", "qwen3_next", "qwen3_5", "qwen3_5_moe")
FIXTURE_NAMES = PAGED + RECURRENT
SPELLINGS = ("config.json", "config.hub.json")
QUICK = (
    "qwen3_moe_mixed",
    "gemma3",
)  # they have between them all that a family adds; an engine over each of the others is for the slow run


class Compiled:
    """Dense logits of up to 128 tokens; padding comes after, where no token looks."""

    def __init__(self, model: Any) -> None:
        graph, self.state = nnx.split(model)
        self.run = jax.jit(lambda state, tokens: dense_logits(nnx.merge(graph, state), tokens))

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        padded = np.zeros(128, np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(self.run(self.state, padded))[: len(tokens)]


@pytest.mark.parametrize("name", FIXTURE_NAMES)
def test_logits_and_greedy_ids_are_those_of_transformers(name: str) -> None:
    run, expected = Compiled(load(FIXTURES / name).model), reference(name)
    for i in (0, 1):
        prompt, greedy = expected[f"input_ids_{i}"], expected[f"greedy_{i}"]
        found = run(np.concatenate([prompt, greedy]))
        assert np.abs(found[: len(prompt)] - expected[f"logits_{i}"]).max() < TOLERANCE
        steps = found[len(prompt) - 1 : -1]
        assert np.abs(steps - expected[f"step_logits_{i}"]).max() < TOLERANCE
        assert steps.argmax(-1).tolist() == greedy.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
def test_layers_that_work_on_rows_compute_the_same_as_those_that_work_on_columns(name: str) -> None:
    """Float32 has the one layout, every other dtype the other; in float16 it is rounded the least."""
    run, expected = Compiled(load(FIXTURES / name, "float16").model), reference(name)
    assert np.abs(run(expected["input_ids_0"]) - expected["logits_0"]).max() < 0.3


@pytest.mark.parametrize("name", [name for name in FIXTURE_NAMES if not name.startswith("qwen3_5")])  # those have one only
def test_both_config_spellings_say_the_same(name: str, tmp_path: Path) -> None:
    new, old = (read_config(json.loads((FIXTURES / name / spelling).read_text())) for spelling in SPELLINGS)
    assert new == old
    assert new.dtype == "bfloat16"
    assert inspect_checkpoint(fixture_copy(name, tmp_path, "config.hub.json")).config == inspect_checkpoint(FIXTURES / name).config


@pytest.mark.parametrize("name", FIXTURE_NAMES)
def test_a_config_comes_back_from_json_as_it_was(name: str) -> None:
    config = inspect_checkpoint(FIXTURES / name).config
    assert type(config).from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "gemma3", "mamba", "qwen3_5_moe"])  # biases, experts, all norms, states
def test_a_converted_checkpoint_has_the_same_weights_in_both_layouts(name: str, tmp_path: Path) -> None:
    weights = jax.tree.leaves(nnx.state(load(FIXTURES / name).model))
    for stored in ("float32", "bfloat16"):  # the second is kept the other way round, and turned when loaded
        converted = load(save_converted(FIXTURES / name, tmp_path / stored, stored))
        found = jax.tree.leaves(nnx.state(converted.model))
        assert len(found) == len(weights)
        assert all(np.array_equal(x, y) for x, y in zip(found, weights, strict=True))


@pytest.fixture(
    scope="module",
    params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ("llama", *FIXTURE_NAMES)],
)
def parking(request: pytest.FixtureRequest) -> Iterator[tuple[str, Engine]]:
    """An engine in float32 that parks every sequence after every three of its tokens."""
    fields = {"model__path": str(FIXTURES / request.param), "model__dtype": "float32", "pool__tokens": 256, "scheduler__rows": 2}
    with tiny.engine(**fields, debug__park_every=3) as made:
        yield request.param, made


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return np.asarray(wide - np.log(np.exp(wide).sum(-1, keepdims=True)))


def test_an_engine_that_parks_every_three_tokens_gives_the_references_greedy_ids_and_logprobs(parking: tuple[str, Engine]) -> None:
    """At every place of both prompts, of the prompt's own token and the twenty likeliest; and of what was said."""
    name, made = parking
    expected = reference(name)
    prompts = [expected[f"input_ids_{i}"].tolist() for i in (0, 1)]
    answers = tiny.run(made, prompts, SamplingParams(max_tokens=32, temperature=0, ignore_eos=True, logprobs=5, prompt_logprobs=20))
    for i, answer in enumerate(answers):
        assert answer.num_parks >= 9
        assert list(answer.token_ids) == expected[f"greedy_{i}"].tolist()
        steps, places = (log_softmax(expected[f"{kind}_{i}"]) for kind in ("step_logits", "logits"))
        assert answer.logprobs is not None and answer.prompt_logprobs is not None
        found = np.array([entry.logprob for entry in answer.logprobs])
        assert np.abs(found - steps.max(-1)).max() < TOLERANCE
        scored = [entry for entry in answer.prompt_logprobs if entry is not None]
        assert [entry.token_id for entry in scored] == prompts[i][1:]
        for place, entry in zip(places, scored, strict=False):
            tokens = [entry.token_id, *(token for token, _ in entry.top)]
            assert np.abs(place[tokens] - [entry.logprob, *(logprob for _, logprob in entry.top)]).max() < TOLERANCE


def test_parks_and_neighbours_change_no_byte(parking: tuple[str, Engine]) -> None:
    _, made = parking
    prompts, params = (list(x) for x in zip(*exactness.subjects(), strict=True))
    parked = list(map(tiny.content, tiny.run(made, prompts, params)))
    often, made.scheduler = made.scheduler, Scheduler(replace(made.scheduler.config, park_every=0))
    assert exactness.answers_alone(made) == parked
    assert made.scheduler.counters.num_parks == 0
    made.scheduler = often


def test_a_missing_bias_or_head_norm_is_named(tmp_path: Path) -> None:
    missing = {"qwen2": "model.layers.1.self_attn.k_proj.bias", "qwen3": "model.layers.1.self_attn.k_norm.weight"}
    for name, key in missing.items():
        (tmp_path / name).mkdir()
        folder = fixture_copy(name, tmp_path / name)
        change_tensors(folder, methodcaller("pop", key))
        with pytest.raises(ModelError, match=rf"1 missing: {key}$"):
            inspect_checkpoint(folder)


@pytest.mark.parametrize("layout", ["language_model.model.", "model.language_model."])
def test_of_a_gemma_that_also_sees_pictures_the_text_part_is_read(tmp_path: Path, layout: str) -> None:
    """Released files have the first layout, those that transformers 5 writes the second."""
    folder = fixture_copy("gemma3", tmp_path)
    text = json.loads((folder / "config.json").read_text())
    text.pop("dtype")
    write_json(folder / "config.json", {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text, "vision_config": {}})

    def wrap(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[name.replace("model.", layout)] = tensors.pop(name)
        picture = "model.vision_tower" if layout.startswith("model.") else "vision_tower"
        tensors[f"{picture}.vision_model.encoder.layers.0.mlp.fc1.bias"] = np.zeros(4, np.float32)

    change_tensors(folder, wrap)
    found, plain = load(folder), load(FIXTURES / "gemma3")
    assert (found.config, found.eos_ids) == (plain.config, plain.eos_ids)
    pairs = zip(*(jax.tree.leaves(nnx.state(loaded.model)) for loaded in (found, plain)), strict=True)
    assert all(np.array_equal(x, y) for x, y in pairs)
