import json
import os
import re
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from safetensors.numpy import save_file

from jaxkv.models import ModelError, check_mesh, dense_logits, inspect_checkpoint
from jaxkv.models.config import Rope
from jaxkv.models.layers import RMSNorm, rope_frequencies, rotate
from jaxkv.models.llama import Llama
from jaxkv.models.load_gguf import unpermute
from jaxkv.models.read_config import read_config
from jaxkv.request import SamplingParams
from tests.cpu import tiny
from tests.cpu.checkpoints import LLAMA, TOLERANCE, llama_copy, load, logits, reference, write_json


@pytest.mark.parametrize("spelling", ["config.json", "config.hub.json"])
def test_logits_and_greedy_ids_are_those_of_transformers_in_both_config_spellings(tmp_path: Path, spelling: str) -> None:
    model, expected = load(llama_copy(tmp_path, spelling)).model, reference()
    for i in (0, 1):
        prompt, greedy = expected[f"input_ids_{i}"], expected[f"greedy_{i}"]
        found = logits(model, np.concatenate([prompt, greedy]))
        assert np.abs(found[: len(prompt)] - expected[f"logits_{i}"]).max() < TOLERANCE
        # Row n - 1 predicts the first generated token, row n + 30 the last of 32: fed the expected ids, every argmax is the next one.
        steps = found[len(prompt) - 1 : -1]
        assert np.abs(steps - expected[f"step_logits_{i}"]).max() < TOLERANCE
        assert steps.argmax(-1).tolist() == greedy.tolist()


def test_both_config_spellings_give_the_same_config() -> None:
    new, old = (read_config(json.loads((LLAMA / name).read_text())) for name in ("config.json", "config.hub.json"))
    assert new == old
    assert new.rope == Rope(theta=100000.0)
    assert (new.num_heads, new.num_kv_heads, new.head_dim, new.dtype, new.max_position) == (4, 2, 16, "float32", 512)


def test_the_model_runs_inside_jit_with_its_parameters_as_arguments() -> None:
    model = load(LLAMA).model
    graphdef, state = nnx.split(model)
    tokens = jnp.asarray(reference()["input_ids_0"])
    jitted = jax.jit(lambda state, tokens: dense_logits(nnx.merge(graphdef, state), tokens))(state, tokens)
    assert np.abs(np.asarray(jitted) - reference()["logits_0"]).max() < TOLERANCE


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.5), ("float16", 0.05)])
def test_narrow_weights_and_activations_give_float32_logits_near_the_reference(dtype: str, tolerance: float) -> None:
    model = load(LLAMA, dtype).model
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(dtype)}
    found = logits(model, reference()["input_ids_1"])
    assert found.dtype == np.float32
    assert np.abs(found - reference()["logits_1"]).max() < tolerance


def test_an_untied_head_is_a_table_of_its_own() -> None:
    config = read_config(json.loads((LLAMA / "config.json").read_text())).with_tied(False)
    model = Llama(config, jnp.dtype("float32"))
    assert model.head.table.shape == (320, 64)


def test_rms_norm_is_computed_in_float32_whatever_the_activations_are() -> None:
    x = np.array([[1e-3, 2e-3, -3e-3, 4e-3]], np.float32)
    expected = x / np.sqrt((x**2).mean() + 1e-5)
    norm = RMSNorm(4, 1e-5, jnp.dtype("bfloat16"))
    found = norm(jnp.asarray(x, jnp.bfloat16))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=2e-2)


def test_rotary_embedding_pairs_dim_i_with_dim_i_plus_half() -> None:
    angle = np.array([[0.5]], np.float32)  # one token, r = 1: dims (0, 1) turn, dims 2 and 3 pass through
    found = rotate(jnp.array([[[1.0, 0.0, 7.0, 8.0]]]), jnp.cos(angle), jnp.sin(angle))
    np.testing.assert_allclose(np.asarray(found), [[[np.cos(0.5), np.sin(0.5), 7.0, 8.0]]], rtol=1e-6)


def test_linear_rope_scaling_divides_every_frequency() -> None:
    plain, scaled = rope_frequencies(Rope(1e4), 8), rope_frequencies(Rope(1e4, "linear", 8.0), 8)
    np.testing.assert_allclose(scaled, plain / 8, rtol=1e-6)


def test_llama3_rope_scaling_keeps_fast_turns_stretches_slow_ones_and_blends_between() -> None:
    rope = Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    plain, found = rope_frequencies(Rope(500000.0), 128), rope_frequencies(rope, 128)
    slow_and_plain = [(2 * np.pi / p, f / p) for p, f in zip(plain.tolist(), found.tolist(), strict=True)]
    for wavelength, ratio in slow_and_plain:
        if wavelength < 8192 / 4:
            assert ratio == pytest.approx(1.0)
        elif wavelength > 8192:
            assert ratio == pytest.approx(1 / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            assert ratio == pytest.approx((1 - smooth) / 8 + smooth, rel=1e-5)
    assert len({round(ratio, 3) for _, ratio in slow_and_plain}) > 3  # the blend is exercised


def test_llama3_rope_is_read_in_both_spellings() -> None:
    base = json.loads((LLAMA / "config.hub.json").read_text())
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    old = read_config({**base, "rope_scaling": {"rope_type": "llama3", **scaling}})
    new = read_config({**base, "rope_theta": None, "rope_parameters": {"rope_theta": 100000.0, "rope_type": "llama3", **scaling}})
    assert old.rope == new.rope == Rope(100000.0, "llama3", 8.0, 1.0, 4.0, 256)


def test_parameters_split_by_heads_and_feed_forward_and_a_vocabulary_only_where_it_divides() -> None:
    split = Llama.partition
    assert split("layers.0.attn.q.kernel", (64, 64), 2) == PartitionSpec(None, "tensor")
    assert split("layers.0.attn.q.weight", (64, 64), 2) == PartitionSpec("tensor", None)
    assert split("layers.11.mlp.down.kernel", (96, 64), 2) == PartitionSpec("tensor", None)
    assert split("layers.11.mlp.down.weight", (64, 96), 2) == PartitionSpec(None, "tensor")
    assert split("layers.0.attn_norm.scale", (64,), 2) == PartitionSpec()
    assert split("embed.table", (320, 64), 2) == PartitionSpec("tensor", None)
    assert split("embed.table", (321, 64), 2) == PartitionSpec()
    assert split("embed.table", (320, 64), 1) == PartitionSpec()


def test_a_mesh_that_does_not_divide_the_heads_is_refused_naming_the_divisors() -> None:
    config = inspect_checkpoint(LLAMA).config
    check_mesh(config, 2)
    check_mesh(config, 4)  # a multiple of the kv heads
    for num in (3, 8):
        with pytest.raises(ModelError) as refused:
            check_mesh(config, num)
        assert str(refused.value) == (
            f"mesh.tensor = {num} must divide this model's 4 query heads and feed-forward dim 96, and divide its 2 kv heads or be a "
            "multiple of them; allowed: 1, 2, 4"
        )


def test_two_devices_give_the_logits_of_one(run_python) -> None:
    source = f"""
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxkv.models import dense_logits, load_checkpoint
loaded = load_checkpoint({str(LLAMA)!r}, dtype="float32", mesh=Mesh(np.array(jax.devices()), ("tensor",)))
assert loaded.model.layers[0].attn.q.weight[...].addressable_shards[0].data.shape == (32, 64)
expected = np.load({str(LLAMA / "reference.npz")!r})
graphdef, state = nnx.split(loaded.model)
step = jax.jit(lambda state, tokens: dense_logits(nnx.merge(graphdef, state), tokens))
print(np.abs(np.asarray(step(state, jnp.asarray(expected["input_ids_1"]))) - expected["logits_1"]).max())
"""
    assert float(run_python(source, devices=2)) < TOLERANCE


def _shared() -> Path:
    root = Path(__file__).parents[2]
    return Path(os.environ.get("JAXKV_SHARED", root.parent / "shared")) / "parity" / "stories260K"


@pytest.mark.skipif(not _shared().exists(), reason="needs the stories260K files: set JAXKV_SHARED")
def test_stories260k_tells_its_documented_story(tmp_path: Path) -> None:
    model = load(_llama2c_folder(_shared() / "stories260K.bin", tmp_path)).model
    graphdef, state = nnx.split(model)
    step = jax.jit(lambda state, tokens: dense_logits(nnx.merge(graphdef, state), tokens))
    for story in json.loads((_shared() / "stories260K_ref.json").read_text()):
        prompt, greedy = story["input_ids"], story["greedy_ids"]
        found = np.asarray(step(state, jnp.asarray(prompt + greedy, jnp.int32)))
        assert found[len(prompt) - 1 : -1].argmax(-1).tolist() == greedy


@pytest.mark.skipif(not _shared().exists(), reason="needs the stories260K files: set JAXKV_SHARED")
def test_stories260k_tells_its_stories_word_for_word_while_it_is_parked_every_three_tokens(tmp_path: Path) -> None:
    folder, vocabulary = _llama2c_folder(_shared() / "stories260K.bin", tmp_path), _vocabulary(_shared() / "tok512.bin")
    stories = json.loads((_shared() / "stories260K_ref.json").read_text())
    params = [SamplingParams(max_tokens=len(story["greedy_ids"]), temperature=0, ignore_eos=True) for story in stories]
    with tiny.engine(model__path=str(folder), model__max_len=512, pool__tokens=512, debug__park_every=3) as made:
        answers = tiny.run(made, [story["input_ids"] for story in stories], params)
    for story, answer in zip(stories, answers, strict=True):
        assert answer.num_parks > 10
        said = b"".join(vocabulary[token] for token in [*story["input_ids"][1:], *answer.token_ids])
        assert said.decode().strip() == story["text"].strip()
        assert answer.token_ids == story["greedy_ids"]


def _vocabulary(path: Path) -> list[bytes]:
    """llama2.c's tokenizer: a count, then of each token a score, a length and its bytes; `<0x0A>` stands for a byte."""
    raw, at, found = path.read_bytes(), 4, []
    while at < len(raw):
        length = int.from_bytes(raw[at + 4 : at + 8], "little")
        token, at = raw[at + 8 : at + 8 + length], at + 8 + length
        found.append(bytes.fromhex(token[3:5].decode()) if re.fullmatch(rb"<0x..>", token) else token)
    return found


def _llama2c_folder(path: Path, folder: Path) -> Path:
    """llama2.c's format: seven int32, then float32 tensors by kind, all layers of a kind together; rotary pairs are interleaved."""
    raw = path.read_bytes()
    dim, ffn, num_layers, num_heads, num_kv_heads, vocab, max_position = struct.unpack("<7i", raw[:28])
    assert vocab > 0, "a negative count would mean a head of its own"
    floats, kv = np.frombuffer(raw, "<f4", offset=28), dim // num_heads * num_kv_heads
    shapes = {
        "model.layers.{}.input_layernorm": (dim,),
        "model.layers.{}.self_attn.q_proj": (dim, dim),
        "model.layers.{}.self_attn.k_proj": (kv, dim),
        "model.layers.{}.self_attn.v_proj": (kv, dim),
        "model.layers.{}.self_attn.o_proj": (dim, dim),
        "model.layers.{}.post_attention_layernorm": (dim,),
        "model.layers.{}.mlp.gate_proj": (ffn, dim),
        "model.layers.{}.mlp.down_proj": (dim, ffn),
        "model.layers.{}.mlp.up_proj": (ffn, dim),
    }
    tensors = {"model.embed_tokens.weight": floats[: vocab * dim].reshape(vocab, dim)}
    at = vocab * dim
    for name, shape in shapes.items():
        heads = num_heads if "q_proj" in name else num_kv_heads if "k_proj" in name else None
        for layer in range(num_layers):
            size = int(np.prod(shape))
            w = floats[at : at + size].reshape(shape)
            tensors[name.format(layer) + ".weight"] = np.array(w if heads is None else unpermute(w, heads), order="C")
            at += size
    tensors["model.norm.weight"] = floats[at : at + dim]
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "llama", "vocab_size": vocab, "hidden_size": dim, "intermediate_size": ffn, "num_hidden_layers": num_layers}
    heads_json = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "max_position_embeddings": max_position}
    write_json(folder / "config.json", {**config, **heads_json, "rms_norm_eps": 1e-5, "rope_theta": 10000.0})
    return folder
