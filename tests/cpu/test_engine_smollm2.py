"""The main job on real weights: SmolLM2-135M-Instruct, float32, eight chats through a pool that holds less than half of them."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv.config import Config
from jaxkv.constraint import Constraint
from jaxkv.engine import Engine
from jaxkv.models import dense_logits
from jaxkv.request import SamplingParams
from tests.cpu import tiny
from tests.cpu.questions import QUESTIONS

pytestmark = pytest.mark.weights

REFERENCE = Path(__file__).parent.parent / "fixtures" / "smollm2_ref.json"


def config(path: Path, **sections: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {"model": {"path": str(path), "dtype": "float32", "max_len": 512}}
    return Config.model_validate({name: {**base.get(name, {}), **sections.get(name, {})} for name in {**base, **sections}})


def test_six_prompts_give_their_64_reference_ids_through_a_pool_for_three_or_four(smollm2: Path) -> None:
    prompts = json.loads(REFERENCE.read_text())["prompts"]
    wish = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    with Engine(config(smollm2, pool={"tokens": 384})) as engine:
        answers = engine.generate([prompt["input_ids"] for prompt in prompts], wish)
        assert engine.scheduler.counters.num_parks > 0
    assert [answer.token_ids for answer in answers] == [prompt["greedy_ids"] for prompt in prompts]


def test_eight_chats_through_less_than_half_the_pool_they_need_equal_the_same_eight_with_room_for_all(smollm2: Path) -> None:
    answers = []
    for sections in (
        {"pool": {"tokens": 1024}},
        {"pool": {"tokens": 288}},
        {"pool": {"tokens": 288}, "debug": {"park_every": 8}},
    ):
        with Engine(config(smollm2, **sections)) as engine:
            texts = [engine.tokenizer.render_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
            prompts = [engine.tokenizer.encode(text, add_special_tokens=False) for text in texts]
            wishes = [SamplingParams(max_tokens=40, temperature=0.8 * (i % 2), seed=i, logprobs=2, ignore_eos=True) for i in range(8)]
            need = sum(len(prompt) + 40 - 1 for prompt in prompts)
            assert (engine.capacity >= need) if sections["pool"]["tokens"] == 1024 else (engine.capacity < need / 2)
            answers.append([tiny.content(answer) for answer in engine.generate(prompts, wishes)])
            parks = engine.scheduler.counters.num_parks
            assert (parks == 0) if sections["pool"]["tokens"] == 1024 else (parks > 0)
            tiny.settle(engine)
            assert engine.summary()["pool_pages_free_end"] == engine.summary()["pool_pages"]
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]


def test_the_logprobs_of_a_prompts_own_tokens_are_the_dense_references(smollm2: Path) -> None:
    """A reference answer as part of the prompt, through chunks of 64 in a pool where its neighbours have it parked."""
    prompts = json.loads(REFERENCE.read_text())["prompts"]
    scored = [prompt["input_ids"] + prompt["greedy_ids"] for prompt in prompts[:2]]
    wish = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    with Engine(config(smollm2, pool={"tokens": 192}, debug={"park_every": 48})) as engine:
        answers = engine.generate(scored, wish)
        assert engine.scheduler.counters.num_parks > 0
        graph, state = nnx.split(engine.parts.checkpoint.model)
        reference = jax.jit(lambda state, tokens: jax.nn.log_softmax(dense_logits(nnx.merge(graph, state), tokens), axis=-1))
        for prompt, ids, answer in zip(prompts, scored, answers, strict=False):
            expected = np.asarray(reference(state, jnp.asarray(ids, jnp.int32)))
            entries = answer.prompt_logprobs or []
            assert len(entries) == len(ids) and entries[0] is None
            found = np.array([entry.logprob for entry in entries if entry is not None])
            assert np.abs(found - expected[np.arange(len(ids) - 1), ids[1:]]).max() < 2e-4
            said = [entry for entry in entries[len(prompt["input_ids"]) :] if entry is not None]
            assert all(entry.logprob == entry.top[0][1] for entry in said)  # greedy, so each is the likeliest


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer", "minimum": 1, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.slow
def test_a_person_by_schema_is_one_and_the_same_when_parked_every_three_tokens(smollm2: Path) -> None:
    """Three ways: greedy, sampled, and sampled with a word that the free answer has."""
    schema = Constraint("json_schema", json.dumps(PERSON))
    wishes = [
        SamplingParams(constraint=schema, max_tokens=60, temperature=0, logprobs=1),
        SamplingParams(constraint=schema, max_tokens=60, temperature=0.9, seed=1, n=2),
        SamplingParams(constraint=schema, max_tokens=60, temperature=0, bad_words=("John", "Jo")),
    ]
    with Engine(config(smollm2, pool={"tokens": 1024})) as engine:
        text = engine.tokenizer.render_chat([{"role": "user", "content": "Invent a person: name and age, as JSON."}])
        prompt = engine.tokenizer.encode(text, add_special_tokens=False)
        plain = engine.generate([prompt] * 3, wishes)
        handles = [handle for wish in wishes for handle in engine.submit_group(prompt, wish).choices]
        num_parked = 0
        for count in range(3, 60, 3):
            for handle in handles:
                tiny.step_to(engine, handle, count)
            num_parked += sum(engine.scheduler.park(handle.seq_id) == "" for handle in handles if not handle.done)
        parked = [handle.result() for handle in handles]
        assert engine.num_compiles_after_warmup == 0
    assert num_parked > 12
    assert [tiny.content(answer) for answer in parked] == [tiny.content(answer) for answer in plain]
    for answer in plain:
        found = json.loads(answer.text)
        assert list(found) == ["name", "age"] and len(found["name"]) <= 30 and 1 <= found["age"] <= 120
        assert answer.finish_reason == "stop"
    assert "Jo" not in plain[3].text
