"""Families with recurrent layers: how their checkpoints and configs are read, what is refused, and how they are split."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from jaxkv.models import ModelError, check_mesh, inspect_checkpoint
from jaxkv.models.load_hf_parts import Part
from jaxkv.models.read_config import read_config
from tests.cpu.checkpoints import FIXTURES, TOLERANCE, change_tensors, fixture_copy, load, write_json


def config_json(name: str, file: str = "config.json") -> dict[str, Any]:
    return dict(json.loads((FIXTURES / name / file).read_text()))


def weights(path: Path) -> dict[str, np.ndarray]:
    state = nnx.to_flat_state(nnx.state(load(path).model))
    return {".".join(map(str, place)): np.asarray(leaf[...]) for place, leaf in state}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(x, b[name]) for name, x in a.items())


def test_a_part_is_the_same_rows_of_every_group() -> None:
    rows = np.arange(10)[:, None]  # two groups of q q k k k
    q, k = Part("q", "qk", 0, 2, 5, num_groups=2), Part("k", "qk", 2, 5, 5, num_groups=2)
    assert q.cut(rows)[:, 0].tolist() == [0, 1, 5, 6]
    assert k.cut(rows)[:, 0].tolist() == [2, 3, 4, 7, 8, 9]
    assert (q.shape((10, 1)), k.shape((10, 1)), k.shape((9, 1))) == ((4, 1), (6, 1), (9, 1))
    assert Part("up", "gate_up", 2, 4, 4, axis=1).cut(np.arange(8).reshape(2, 4)).tolist() == [[2, 3], [6, 7]]


def test_experts_are_read_packed_and_one_by_one(tmp_path: Path) -> None:
    folder = fixture_copy("qwen3_5_moe", tmp_path)

    def unpack(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if ".mlp.experts." in name]:
            stem, tensor = name.removesuffix("gate_up_proj").removesuffix("down_proj"), tensors.pop(name)
            for i, expert in enumerate(tensor):
                halves = {"gate_proj": expert[:16], "up_proj": expert[16:]} if name.endswith("gate_up_proj") else {"down_proj": expert}
                tensors |= {f"{stem}{i}.{kind}.weight": half.copy() for kind, half in halves.items()}

    change_tensors(folder, unpack)
    assert same(weights(folder), weights(FIXTURES / "qwen3_5_moe"))


def test_a_text_part_saved_by_itself_is_the_same_model(tmp_path: Path) -> None:
    folder = fixture_copy("qwen3_5", tmp_path)
    write_json(folder / "config.json", {**config_json("qwen3_5")["text_config"], "dtype": "bfloat16"})

    def strip(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensor = tensors.pop(name)
            if "language_model." in name:
                tensors[name.replace("language_model.", "")] = tensor

    change_tensors(folder, strip)
    assert inspect_checkpoint(folder).config == inspect_checkpoint(FIXTURES / "qwen3_5").config
    assert same(weights(folder), weights(FIXTURES / "qwen3_5"))


def test_missing_and_misshapen_fused_tensors_are_named(tmp_path: Path) -> None:
    name = "model.layers.1.linear_attn.in_proj_qkvz.weight"
    for folder in (tmp_path / "missing", tmp_path / "short"):
        folder.mkdir()
    missing, short = fixture_copy("qwen3_next", tmp_path / "missing"), fixture_copy("qwen3_next", tmp_path / "short")
    change_tensors(missing, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=rf"1 missing: {name}$"):
        inspect_checkpoint(missing)
    change_tensors(short, lambda tensors: tensors.update({name: tensors[name][:-1].copy()}))
    with pytest.raises(ModelError, match=rf"tensor '{name}' gives \(191, 64\), the config asks for \(32, 64\)"):
        inspect_checkpoint(short)


def test_older_spellings_of_a_hybrid_say_the_same() -> None:
    new = config_json("qwen3_5")
    text = dict(new["text_config"])
    rope = {"rope_type": text["rope_parameters"].pop("rope_type"), "mrope_section": text["rope_parameters"].pop("mrope_section")}
    theta = text.pop("rope_parameters")["rope_theta"]
    text.pop("layer_types")
    old = {**text, "rope_theta": theta, "rope_scaling": rope, "partial_rotary_factor": 0.25, "full_attention_interval": 4}
    assert read_config({**new, "text_config": old}) == read_config(new)
    assert read_config(new).recurrent == read_config(config_json("qwen3_next")).recurrent


def test_what_mamba_leaves_out_follows_from_its_width_and_its_context_has_a_length_of_ours() -> None:
    full = config_json("mamba")
    left_out = ("expand", "intermediate_size", "conv_kernel", "use_conv_bias", "use_bias")
    least = {key: value for key, value in full.items() if key not in left_out} | {"time_step_rank": "auto"}
    assert read_config(least) == read_config(full)
    assert read_config(full).max_position == 32_768
    assert read_config({**full, "max_position_embeddings": 9000}).max_position == 9000


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "qwen3_next",
        {"layer_types": ["linear_attention", "sliding_attention"] * 2},
        "layer_types must say 'full_attention' or 'linear_attention' for each of 4 layers, got ",
    ),
    ("qwen3_next", {"linear_num_key_heads": 3}, "linear_num_key_heads must divide linear_num_value_heads = 4, got 3"),
    ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate = False is not supported for 'qwen3_next', only True"),
    ("qwen3_next", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype = 'bfloat16' is not supported for 'qwen3_next', only 'float32'"),
    ("mamba2", {"num_heads": 4}, "num_heads * head_dim must be expand * hidden_size = 128, got 4 * 16"),
    ("mamba2", {"n_groups": 3}, "n_groups must divide num_heads = 8, got 3"),
    ("mamba2", {"time_step_limit": [0.0, 0.1]}, "time_step_limit = [0.0, 0.1] is not supported for 'mamba2', only [0, Infinity]"),
    ("mamba", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported for 'mamba', only 'silu'"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED, ids=[f"{name}-{key}" for name, changes, _ in REFUSED for key in changes])
def test_a_config_that_is_not_computed_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as refused:
        read_config({**config_json(name), **changes})
    assert message in str(refused.value)


def test_a_mesh_has_to_divide_recurrent_heads_and_the_shared_expert_too() -> None:
    said = {
        "qwen3_next": "4 query heads, feed-forward dim 96, 16 of its experts, 32 of the shared one, 4 recurrent heads and 2 recurrent key "
        "heads, and divide its 2 kv heads or be a multiple of them; allowed: 1, 2",
        "mamba": "128 channels; allowed: 1, 2, 4, 8, 16, 32, 64, 128",
        "mamba2": "8 recurrent heads; allowed: 1, 2, 4, 8",
    }
    for name, message in said.items():
        config = inspect_checkpoint(FIXTURES / name).config
        check_mesh(config, 2)
        with pytest.raises(ModelError) as refused:
            check_mesh(config, 3)
        assert str(refused.value) == f"mesh.tensor = 3 must divide this model's {message}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("mamba", "layers[0].mixer.scan.log_rate[...].addressable_shards[0].data.shape == (128, 16)"),
        ("mamba2", "layers[0].mixer.x.weight[...].addressable_shards[0].data.shape == (64, 64)"),
        ("qwen3_next", "layers[0].attn.v.weight[...].addressable_shards[0].data.shape == (32, 64)"),
        ("qwen3_5_moe", "layers[0].mlp.shared.gate.weight[...].addressable_shards[0].data.shape == (16, 64)"),
    ],
)
def test_two_devices_give_the_logits_of_one(name: str, where: str, run_python: Any) -> None:
    source = f"""
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxkv.models import dense_logits, load_checkpoint
loaded = load_checkpoint({str(FIXTURES / name)!r}, dtype="float32", mesh=Mesh(np.array(jax.devices()), ("tensor",)))
assert loaded.model.{where}
expected = np.load({str(FIXTURES / name / "reference.npz")!r})
graphdef, state = nnx.split(loaded.model)
step = jax.jit(lambda state, tokens: dense_logits(nnx.merge(graphdef, state), tokens))
print(np.abs(np.asarray(step(state, jnp.asarray(expected["input_ids_1"]))) - expected["logits_1"]).max())
"""
    assert float(run_python(source, devices=2)) < TOLERANCE
