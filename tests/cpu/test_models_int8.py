"""Weights in int8: the arithmetic, where it is used, and that a checkpoint gives the same however it comes."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv.models import Checkpoint, dense_logits, inspect_checkpoint, load_checkpoint, save_converted
from jaxkv.models.int8 import quantised
from jaxkv.models.parameters import build_model, flat_parameters
from jaxkv.request import SamplingParams
from tests.cpu import tiny
from tests.cpu.checkpoints import FIXTURES, LLAMA, TOLERANCE, one_device, reference, write_gguf

FAMILIES = ("llama", "gemma3", "qwen2", "qwen3", "mistral", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "mamba", "mamba2")
STEERING = {  # the layers whose products stay as they are
    "qwen3_moe": {"mlp.router"},
    "qwen3_next": {"mlp.router", "mlp.shared_gate", "attn.beta", "attn.step"},
    "qwen3_5": {"attn.beta", "attn.step"},
    "qwen3_5_moe": {"mlp.router", "mlp.shared_gate", "attn.beta", "attn.step"},
    "mamba": {"mixer.scan.mix", "mixer.scan.step_size"},
    "mamba2": {"mixer.step"},
}


def load(path: Path, dtype: str = "float32", weight_dtype: str | None = "int8") -> Checkpoint:
    return load_checkpoint(path, dtype=dtype, mesh=one_device(), weight_dtype=weight_dtype)


def arrays(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return {path: np.asarray(x) for path, x in flat_parameters(nnx.state(checkpoint.model)).items()}


def same(one: Checkpoint, other: Checkpoint) -> bool:
    a, b = arrays(one), arrays(other)
    return a.keys() == b.keys() and all(a[path].dtype == b[path].dtype and np.array_equal(a[path], b[path]) for path in a)


def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    graph, state = nnx.split(model)
    return np.asarray(jax.jit(lambda state: dense_logits(nnx.merge(graph, state), jnp.asarray(tokens)))(state))


def test_each_output_channel_has_its_own_scale() -> None:
    numbers, scale = quantised(np.array([[0.5, -1.27, 0.02], [0.0, 0.0, 0.0], [1e-4, 2.54e-2, -1.27e-2]], np.float32))
    assert numbers.tolist() == [[50, -127, 2], [0, 0, 0], [0, 127, -63]] or numbers.tolist() == [[50, -127, 2], [0, 0, 0], [0, 127, -64]]
    np.testing.assert_allclose(scale * 127, [1.27, 127 * np.finfo(np.float32).tiny, 2.54e-2], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_is_that_of_the_numbers_times_the_scales(dtype: str) -> None:
    layer, x = load(LLAMA, dtype).model.layers[1].mlp.down, np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32)
    x = np.asarray(jnp.asarray(x, dtype).astype(jnp.float32))
    columns = dtype == "float32"
    weight = np.asarray(layer.weight[...] if columns else layer.kernel[...].T)
    assert weight.dtype == np.int8 and np.abs(weight).max() == 127
    expected = x.astype(np.float64) @ (weight * np.asarray(layer.channel_scale[...], np.float64)[:, None]).T
    found = layer.wide(jnp.asarray(x.T if columns else x, dtype))
    np.testing.assert_allclose(found.T if columns else found, expected, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_familys_products_are_in_int8_but_the_small_ones_that_steer(name: str) -> None:
    """The logits are those of a model in float32 whose weights are numbers times scales."""
    narrow, wide = load(FIXTURES / name), load(FIXTURES / name, weight_dtype=None)
    found, plain = arrays(narrow), arrays(wide)
    layers = {path.rpartition(".")[0]: x.dtype == np.int8 for path, x in found.items() if path.endswith(".weight")}
    assert {layer.split(".", 2)[-1] for layer, is_narrow in layers.items() if not is_narrow} == STEERING.get(name, set())
    assert any(layers.values())
    for layer in (layer for layer, is_narrow in layers.items() if is_narrow):
        plain[f"{layer}.weight"] = found[f"{layer}.weight"] * found[f"{layer}.channel_scale"][..., None]
    expected = build_model(wide.config, "float32", {path: jnp.asarray(x) for path, x in plain.items()})
    tokens = reference(name)["input_ids_0"]
    both = logits(narrow.model, tokens), logits(expected, tokens)
    assert np.abs(both[0] - both[1]).max() < TOLERANCE
    assert np.abs(both[0] - reference(name)["logits_0"]).max() > TOLERANCE  # another model than the one it was made from


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_a_gguf_file_and_converted_ones_give_the_same(tmp_path: Path, dtype: str) -> None:
    plain = load(LLAMA, dtype)
    narrow = save_converted(LLAMA, tmp_path / "narrow", "float32", weight_dtype="int8")
    wide = save_converted(LLAMA, tmp_path / "wide", "float32")
    assert inspect_checkpoint(narrow).weight_dtype == "int8"
    assert inspect_checkpoint(wide).weight_dtype is None
    assert same(load(wide, dtype), plain)
    assert same(load(write_gguf(tmp_path / "model.gguf"), dtype), plain)
    kept = load(narrow, dtype, None)
    assert arrays(kept)["layers.0.attn.q.channel_scale"].dtype == np.float32
    assert same(kept, plain) == (kept.weights_sha256 == plain.weights_sha256) == (dtype == "float32")  # else rounded before, or not


def test_experts_come_the_same_from_a_converted_folder_of_the_other_layout(tmp_path: Path) -> None:
    source = FIXTURES / "qwen3_5_moe"
    narrow = save_converted(source, tmp_path / "narrow", "bfloat16", weight_dtype="int8")
    found = load(narrow, "bfloat16", None)
    assert same(found, load(source, "bfloat16"))
    turned, straight = arrays(load(narrow, "float32", None)), arrays(found)
    np.testing.assert_array_equal(turned["layers.0.mlp.up.weight"], straight["layers.0.mlp.up.kernel"].swapaxes(-1, -2))
    np.testing.assert_array_equal(turned["layers.0.mlp.up.channel_scale"], straight["layers.0.mlp.up.channel_scale"])


def test_two_devices_have_the_logits_of_one(run_python: Any) -> None:
    source = f"""
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxkv.models import dense_logits, load_checkpoint
found = []
for num in (1, 2):
    mesh = Mesh(np.array(jax.devices()[:num]), ("tensor",))
    model = load_checkpoint({str(FIXTURES / "qwen3_moe")!r}, dtype="float32", mesh=mesh, weight_dtype="int8").model
    graphdef, state = nnx.split(model)
    found.append(jax.jit(lambda state: dense_logits(nnx.merge(graphdef, state), jnp.arange(3, 40)))(state))
parts = [x[...].addressable_shards[0].data.shape for x in (model.layers[0].mlp.up.weight, model.layers[0].mlp.up.channel_scale)]
assert parts == [(8, 8, 64), (8, 8)], parts
print(np.abs(np.asarray(found[0]) - np.asarray(found[1])).max())
"""
    assert float(run_python(source, devices=2)) < 2e-4


IN_INT8 = {"model__weight_dtype": "int8", "pool__kv_dtype": "int8"}
PROMPTS = [tiny.prompt(n) for n in (5, 20, 33)]
WISHES = [SamplingParams(max_tokens=28, ignore_eos=True, logprobs=2, temperature=0.8 * (i % 2), seed=i) for i in range(3)]


def test_an_answer_depends_on_the_request_alone_with_weights_and_cells_in_int8() -> None:
    with tiny.engine(**IN_INT8) as made:
        expected = [tiny.content(c) for c in tiny.alone(made, PROMPTS, WISHES)]
        assert made.scheduler.counters.num_parks == 0
        assert [tiny.content(c) for c in tiny.run(made, PROMPTS, WISHES)] == expected
        assert made.scheduler.counters.num_parks > 0
        assert made.parts.fingerprint_facts["weight_dtype"] == "int8"
        assert "llama in float32 with weights in int8 on" in made.parts.messages[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "mamba", "mamba2"])
def test_so_it_does_in_bfloat16_parked_and_computed_again_in_every_kind_of_layer(family: str) -> None:
    fields = {**IN_INT8, "model__path": str(FIXTURES / family), "model__dtype": "bfloat16"}
    with tiny.engine(**fields, pool__tokens=256) as made:
        expected = [tiny.content(c) for c in tiny.alone(made, PROMPTS, WISHES)]
    with tiny.engine(**fields, debug__park_every=2) as made:
        assert [tiny.content(c) for c in tiny.run(made, PROMPTS, WISHES)] == expected
        assert made.scheduler.counters.num_parks > 8
    with tiny.engine(**fields, scheduler__host_budget_mib=0, debug__park_every=5) as made:
        assert [tiny.content(c) for c in tiny.run(made, PROMPTS, WISHES)] == expected
        assert made.scheduler.counters.num_replayed_tokens > 20
