"""The real SmolLM2: its tokenizer, its template and its first answers, through the dense reference."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv.models import Checkpoint, dense_logits, inspect_checkpoint
from tests.cpu.checkpoints import FIXTURES, load

pytestmark = pytest.mark.weights
REFERENCE: dict[str, Any] = json.loads((FIXTURES / "smollm2_ref.json").read_text())


@pytest.fixture(scope="module")
def checkpoint(smollm2: Path) -> Checkpoint:
    return load(smollm2)


def test_the_file_says_what_it_is_without_its_weights(smollm2: Path) -> None:
    info = inspect_checkpoint(smollm2)
    assert (info.format, info.eos_ids, info.has_tokenizer, info.weights_bytes) == ("gguf", frozenset({2}), True, 98_362_432)
    config = info.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim, config.tie_embeddings) == (30, 9, 3, 64, True)


def test_digits_are_tokens_of_their_own(checkpoint: Checkpoint) -> None:
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer.encode("a  5 b") == [81, 256, 37, 278]
    assert checkpoint.tokenizer.decode([81, 256, 37, 278]) == "a  5 b"


def test_the_weights_are_named_by_the_files_hash(checkpoint: Checkpoint) -> None:
    assert checkpoint.weights_sha256 == REFERENCE["sha256"]


@pytest.mark.parametrize("prompt", REFERENCE["prompts"], ids=lambda prompt: prompt["prompt"][:20])
def test_a_chat_renders_to_the_reference_text_and_ids(checkpoint: Checkpoint, prompt: dict[str, Any]) -> None:
    tokenizer = checkpoint.tokenizer
    assert tokenizer is not None
    text = tokenizer.render_chat([{"role": "user", "content": prompt["prompt"]}])
    assert text == prompt["rendered"]
    assert tokenizer.encode(text, add_special_tokens=False) == prompt["input_ids"]
    assert tokenizer.decode(prompt["greedy_ids"][: prompt["tokens_before_eos"]]) == prompt["text"]


def test_first_logits_and_greedy_ids_are_the_reference(checkpoint: Checkpoint) -> None:
    graphdef, state = nnx.split(checkpoint.model)
    step = jax.jit(lambda state, tokens: dense_logits(nnx.merge(graphdef, state), tokens))
    prompt = REFERENCE["prompts"][0]
    ids, greedy = prompt["input_ids"], prompt["greedy_ids"]
    found = np.asarray(step(state, jnp.asarray(ids + greedy, jnp.int32)))[len(ids) - 1 : -1]
    assert found.argmax(-1).tolist() == greedy
    for token_id, logit in prompt["first_logits_top8"]:
        assert found[0, token_id] == pytest.approx(logit, abs=2e-3)
