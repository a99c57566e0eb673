"""Draft heads: their logits, chains of guesses and how many of those come true, against what transformers computed."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv.models import ModelError, dense_attend, load_draft_head, save_converted
from jaxkv.models.dense import dense_advance
from jaxkv.models.parameters import flat_parameters
from tests.cpu.checkpoints import FIXTURES, TOLERANCE, change_tensors, fixture_copy, load, one_device, reference

WIDTH = 128  # padding comes after, where no token looks


class Drafter:
    """A target and its head over whole sequences."""

    def __init__(self, name: str) -> None:
        target = load(FIXTURES / name).model
        graphs, self.weights = nnx.split((target, load_draft_head(FIXTURES / name, dtype="float32", mesh=one_device())))
        advance, at = dense_advance(target.config, "float32"), jnp.arange(WIDTH)

        def merged(weights: Any) -> Any:
            return nnx.merge(graphs, weights)

        self.target = jax.jit(lambda weights, tokens: merged(weights)[0](tokens, at, None, dense_attend, advance)[0])

        @jax.jit
        def head(weights: Any, tokens: Any, hidden: Any) -> Any:
            target, head = merged(weights)
            found, _ = head(target, tokens, hidden, at, None, dense_attend)
            return found, target.logits(found)

        self.head = head
        self.expected: Mapping[str, np.ndarray] = reference(name)

    def hidden(self, tokens: np.ndarray) -> np.ndarray:
        return np.asarray(self.target(self.weights, padded(tokens)))[: len(tokens)]

    def guess(self, tokens: np.ndarray, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The head's hidden states and logits; `tokens` are one ahead."""
        found, logits = self.head(self.weights, padded(tokens), padded(hidden))
        return np.asarray(found)[: len(tokens)], np.asarray(logits)[: len(tokens)]

    def chain(self, tokens: np.ndarray, hidden: np.ndarray, length: int) -> tuple[list[int], list[np.ndarray]]:
        """So many guesses after the last token, each from the one before."""
        guesses, all_logits = [], []
        for _ in range(length):
            found, logits = self.guess(tokens, hidden)
            guesses.append(int(logits[-1].argmax()))
            all_logits.append(logits[-1])
            tokens, hidden = np.append(tokens, np.int32(guesses[-1])), np.concatenate([hidden, found[-1:]])
        return guesses, all_logits


def padded(x: np.ndarray) -> np.ndarray:
    made = np.zeros((WIDTH, *x.shape[1:]), np.float32 if x.dtype.kind == "f" else np.int32)
    made[: len(x)] = x
    return made


@pytest.fixture(scope="module", params=["qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)])
def drafter(request: pytest.FixtureRequest) -> Drafter:
    return Drafter(request.param)


def test_logits_at_every_position_are_those_of_transformers(drafter: Drafter) -> None:
    for i in (0, 1):
        prompt, first = drafter.expected[f"input_ids_{i}"], drafter.expected[f"greedy_{i}"][:1]
        _, logits = drafter.guess(np.append(prompt[1:], first), drafter.hidden(prompt))
        assert np.abs(logits - drafter.expected[f"mtp_logits_{i}"]).max() < TOLERANCE


def test_a_chain_of_three_guesses_is_that_of_transformers(drafter: Drafter) -> None:
    for i in (0, 1):
        prompt, first = drafter.expected[f"input_ids_{i}"], drafter.expected[f"greedy_{i}"][:1]
        guesses, logits = drafter.chain(np.append(prompt[1:], first), drafter.hidden(prompt), 3)
        assert guesses == drafter.expected[f"mtp_draft_{i}"].tolist()
        assert np.abs(np.stack(logits) - drafter.expected[f"mtp_draft_logits_{i}"]).max() < TOLERANCE


def test_as_many_guesses_come_true_in_every_round_as_recorded(drafter: Drafter) -> None:
    """A round starts from the target's own hidden states of all that is known, whatever the head guessed before."""
    for i in (0, 1):
        prompt, greedy = drafter.expected[f"input_ids_{i}"], drafter.expected[f"greedy_{i}"]
        tokens = np.concatenate([prompt, greedy])
        hidden, known, accepted = drafter.hidden(tokens), len(prompt) + 1, []
        for expected in drafter.expected[f"mtp_accept3_{i}"].tolist():
            guesses, _ = drafter.chain(tokens[1:known], hidden[: known - 1], 3)
            true = [guess == token for guess, token in zip(guesses, tokens[known:], strict=False)]
            accepted.append(true.index(False) if False in true else min(len(true), expected))
            known += accepted[-1] + 1
        assert accepted == drafter.expected[f"mtp_accept3_{i}"].tolist()


def test_a_head_is_asked_for_only_where_there_is_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as refused:
        load_draft_head(FIXTURES / "qwen3_next", dtype="float32", mesh=one_device())
    assert str(refused.value) == (
        f"{FIXTURES / 'qwen3_next'} has no draft head; the Hugging Face folders of qwen3_next, qwen3_5 and qwen3_5_moe have one where they "
        "hold tensors named mtp.*, and so has what they are converted to"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("mtp.fc.weight"), r"1 missing: mtp\.fc\.weight$"),
        (lambda tensors: tensors.update({"mtp.more": np.zeros(1, np.float32)}), r"1 left over: mtp\.more$"),
    ],
)
def test_missing_and_left_over_tensors_of_a_head_are_named(change: Callable[[Any], Any], message: str, tmp_path: Path) -> None:
    folder = fixture_copy("qwen3_5", tmp_path)
    change_tensors(folder, change)
    load(folder)  # the model does not need it
    with pytest.raises(ModelError, match=message):
        load_draft_head(folder, dtype="float32", mesh=one_device())


@pytest.mark.parametrize(("dtype", "weight_dtype"), [("float32", None), ("bfloat16", None), ("float32", "int8")])
def test_a_converted_folder_keeps_the_head_bit_for_bit(tmp_path: Path, dtype: str, weight_dtype: str | None) -> None:
    source = FIXTURES / "qwen3_5_moe"
    folder = save_converted(source, tmp_path / "converted", "float32", weight_dtype=weight_dtype)
    heads = [load_draft_head(source, dtype=dtype, mesh=one_device(), weight_dtype=weight_dtype)]
    heads.append(load_draft_head(folder, dtype=dtype, mesh=one_device()))
    one, other = (flat_parameters(nnx.state(head)) for head in heads)
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[path], other[path]) and one[path].dtype == other[path].dtype for path in one)
    assert load(folder).config == load(source).config


def test_a_converted_folder_without_a_head_says_so(tmp_path: Path) -> None:
    folder = save_converted(FIXTURES / "qwen3_next", tmp_path / "converted", "float32")
    with pytest.raises(ModelError, match="has no draft head"):
        load_draft_head(folder, dtype="float32", mesh=one_device())
