import hashlib
import json
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file, save_file

from jaxkv.models import ModelError, inspect_checkpoint, load_checkpoint, load_tokenizer, save_converted
from jaxkv.models.gguf_file import GgufTensor, read_gguf
from jaxkv.models.safetensors_file import read_header
from tests.cpu.checkpoints import LLAMA, change_tensors, llama_copy, load, logits, one_device, reference, write_gguf, write_json


def same_weights(a: Any, b: Any) -> bool:
    left, right = jax.tree.leaves(nnx.state(a)), jax.tree.leaves(nnx.state(b))
    return len(left) == len(right) and all(np.array_equal(x, y) for x, y in zip(left, right, strict=True))


def test_inspecting_says_what_a_folder_holds() -> None:
    info = inspect_checkpoint(LLAMA)
    assert (info.format, info.has_tokenizer, info.eos_ids, info.weights_bytes) == ("huggingface", False, frozenset({2}), 455336)
    assert (info.config.num_layers, info.config.tie_embeddings) == (3, True)


def test_loading_reports_its_stages_and_the_hash_of_the_weight_file() -> None:
    stages: dict[str, float] = {}
    loaded = load_checkpoint(LLAMA, dtype="float32", mesh=one_device(), on_stage=stages.__setitem__)
    assert list(stages) == ["open", "tokenizer", "read", "convert", "place", "hash"]
    assert loaded.weights_sha256 == hashlib.sha256((LLAMA / "model.safetensors").read_bytes()).hexdigest()
    assert loaded.tokenizer is None


def test_a_sharded_checkpoint_loads_like_a_single_file(tmp_path: Path) -> None:
    folder = llama_copy(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    halves = {f"model-0000{i + 1}-of-00002.safetensors": dict(list(tensors.items())[i::2]) for i in range(2)}
    for name, half in halves.items():
        save_file(half, folder / name)
    write_json(folder / "model.safetensors.index.json", {"weight_map": {key: name for name, half in halves.items() for key in half}})
    (folder / "model.safetensors").unlink()
    loaded = load(folder)
    assert same_weights(loaded.model, load(LLAMA).model)
    both = b"".join((folder / name).read_bytes() for name in sorted(halves))
    assert loaded.weights_sha256 == hashlib.sha256(both).hexdigest()

    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"names weight files that are not there: model-00002-of-00002\.safetensors"):
        inspect_checkpoint(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_in_float16_are_read_as_they_were_written(tmp_path: Path, dtype: str) -> None:
    narrow, wide = llama_copy(tmp_path), tmp_path / "wide"
    change_tensors(narrow, lambda tensors: tensors.update({name: x.astype(np.float16) for name, x in tensors.items()}))
    shutil.copytree(narrow, wide)
    change_tensors(wide, lambda tensors: tensors.update({name: x.astype(np.float32) for name, x in tensors.items()}))
    assert {entry.dtype for entry in read_header(narrow / "model.safetensors").values()} == {"F16"}
    assert same_weights(load(narrow, dtype).model, load(wide, dtype).model)


def test_a_head_in_the_file_is_used_whatever_the_config_says_of_tying(tmp_path: Path) -> None:
    folder = llama_copy(tmp_path)
    change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": 2 * tensors["model.embed_tokens.weight"]}))
    found = logits(load(folder).model, reference()["input_ids_0"])
    np.testing.assert_allclose(found, 2 * reference()["logits_0"], atol=4e-4)


def test_end_of_text_ids_are_those_of_both_config_files_numbers_or_lists(tmp_path: Path) -> None:
    folder = llama_copy(tmp_path, eos_token_id=[2, 5])
    write_json(folder / "generation_config.json", {"eos_token_id": 9})
    assert inspect_checkpoint(folder).eos_ids == {2, 5, 9}
    (folder / "generation_config.json").unlink()
    assert inspect_checkpoint(folder).eos_ids == {2, 5}


def test_missing_and_left_over_tensors_are_listed_before_anything_is_loaded(tmp_path: Path) -> None:
    folder = llama_copy(tmp_path)

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)  # ignored: it follows from the config
        del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]

    change_tensors(folder, change)
    message = (
        r"the tensors do not fit the model; 2 missing: model\.layers\.1\.mlp\.up_proj\.weight, model\.norm\.weight; "
        r"1 left over: model\.layers\.0\.self_attn\.q_proj\.bias$"
    )
    for attempt in (inspect_checkpoint, load):
        with pytest.raises(ModelError, match=message):
            attempt(folder)


def test_a_head_that_the_config_promises_and_the_file_lacks_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"1 missing: lm_head\.weight"):
        inspect_checkpoint(llama_copy(tmp_path, tie_word_embeddings=False))


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = llama_copy(tmp_path, intermediate_size=128)
    with pytest.raises(ModelError, match=r"gate_proj\.weight' gives \(96, 64\), the config asks for \(128, 64\)"):
        inspect_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt_neox"}, r"model_type 'gpt_neox' is not supported; supported are: gemma3, gemma3_text, llama, .*qwen3_next$"),
        ({"model_type": None}, r"model_type 'None' is not supported; supported are: .*llama"),
        ({"hidden_size": None}, r"config\.json: hidden_size must be a positive integer, got nothing"),
        ({"num_attention_heads": 0}, r"config\.json: num_attention_heads must be a positive integer, got 0"),
        ({"num_key_value_heads": 3}, r"4 query heads cannot share 3 kv heads evenly"),
        ({"head_dim": 15}, r"head_dim must be even for rotary embeddings, got 15"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}},
            r"rope type 'yarn' is not supported; supported are: default, linear",
        ),
        ({"num_hidden_layers": 10**9}, r"model config: 1000000000 layers, allowed: at most 10000"),
        ({"vocab_size": 10**20}, r"config\.json: vocab_size is 1(0){20}, allowed: at most 2147483647"),
        ({"eos_token_id": {"a": 1}}, r"eos_token_id: got \{'a': 1\}, allowed: a token id or a list of token ids"),
        ({"rms_norm_eps": "x"}, r"is damaged: a header holds a value of the wrong kind .ValueError: .*'x'"),
        ({"rope_parameters": [1]}, r"is damaged: a header holds a value of the wrong kind .TypeError"),
        ({"attention_bias": True}, r"attention_bias = True is not supported for 'llama', only False"),
        ({"hidden_act": "gelu"}, r"hidden_act = 'gelu' is not supported for 'llama', only 'silu'"),
    ],
)
def test_a_config_that_cannot_be_computed_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        inspect_checkpoint(llama_copy(tmp_path, **changes))


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"model\.dtype = 'int8' is not supported; use one of float32, bfloat16, float16"):
        load(LLAMA, "int8")


def test_a_missing_path_and_a_folder_without_a_model_say_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere does not exist"):
        inspect_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"is no model folder: it has neither config\.json .* nor jaxkv\.json"):
        inspect_checkpoint(tmp_path)
    (tmp_path / "model.Q4.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"point at one of its files: model\.Q4\.gguf"):
        inspect_checkpoint(tmp_path)


def test_a_folder_without_safetensors_says_which_files_are_looked_for(tmp_path: Path) -> None:
    folder = llama_copy(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        inspect_checkpoint(folder)


def test_damaged_files_are_named_with_what_is_wrong(tmp_path: Path) -> None:
    folder = llama_copy(tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1000])
    with pytest.raises(ModelError, match=r"model\.safetensors is not a whole safetensors file: .* ends at byte \d+, the file has 454336"):
        inspect_checkpoint(folder)
    for damage in (b"", b"\xff" * 64, whole[:200]):
        (folder / "model.safetensors").write_bytes(damage)
        with pytest.raises(ModelError, match=r"model\.safetensors is not a whole safetensors file"):
            inspect_checkpoint(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read as JSON"):
        inspect_checkpoint(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json must hold a JSON object, got a list"):
        inspect_checkpoint(folder)


def test_a_gguf_file_gives_the_logits_of_the_folder_it_was_made_from(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    loaded = load(path)
    assert same_weights(loaded.model, load(LLAMA).model)
    tokens = reference()["input_ids_1"]
    np.testing.assert_array_equal(logits(loaded.model, tokens), logits(load(LLAMA).model, tokens))
    assert (loaded.eos_ids, loaded.tokenizer) == (frozenset({2}), None)
    assert inspect_checkpoint(path).format == "gguf"
    assert loaded.weights_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_gguf_file_of_another_architecture_or_with_missing_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"GGUF architecture 'falcon' is not supported; supported are: llama .for other families use a Hugging"
    ):
        inspect_checkpoint(write_gguf(tmp_path / "falcon.gguf", arch="falcon"))
    with pytest.raises(ModelError, match=r"1 missing: blk\.2\.ffn_up\.weight$"):
        inspect_checkpoint(write_gguf(tmp_path / "gap.gguf", skip="blk.2.ffn_up.weight"))
    with pytest.raises(ModelError, match=r"rope type 'yarn' is not supported"):
        inspect_checkpoint(write_gguf(tmp_path / "yarn.gguf", metadata=lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)))


def test_a_damaged_gguf_file_is_named_with_what_is_wrong(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "broken.gguf"
    path.write_bytes(whole[:-5000])
    with pytest.raises(ModelError, match=r"broken\.gguf is not a whole GGUF file: tensor .* ends at byte \d+"):
        inspect_checkpoint(path)
    endless = b"\xff\xff\xff\xff\xff\xff\xff"  # a length of nearly 2**64 for the first key: no memory is asked for
    for damage in (b"", b"PK\x03\x04" + whole[4:], whole[:300], whole[:25] + endless + whole[32:]):
        path.write_bytes(damage)
        with pytest.raises(ModelError, match=r"broken\.gguf is not a whole GGUF file"):
            inspect_checkpoint(path)


@pytest.mark.parametrize("rows", [1, 3, 32, 48, 72])
@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0, GGMLQuantizationType.F16, GGMLQuantizationType.F32])
def test_joining_rows_changes_no_value_of_a_block_format(tmp_path: Path, rows: int, kind: GGMLQuantizationType) -> None:
    values = np.random.default_rng(rows).normal(size=(rows, 64)).astype(np.float32)
    (tmp_path / "t").write_bytes(quantize(values, kind).tobytes())
    tensor = GgufTensor(tmp_path / "t", (rows, 64), kind, 0)
    raw = tensor.read()
    assert tensor.dequantize(raw).tobytes() == dequantize(raw, kind).tobytes()
    assert tensor.dequantize(raw).shape == (rows, 64)


def test_a_vocabulary_is_read_as_it_was_written_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    words = ["", "a", "Ġé", "日本", "x" * 300]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(words)
        writer.add_token_merges(["a b"])

    path = write_gguf(tmp_path / "words.gguf", metadata=add)
    metadata = read_gguf(path).metadata
    assert (metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]) == (words, ["a b"])
    whole = path.read_bytes()
    at = whole.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 4 + 4  # the array's length, then the first string's
    for start, message in ((at, "is not a whole GGUF file"), (at + 8, "it ends inside a string")):
        path.write_bytes(whole[:start] + struct.pack("<Q", 2**62) + whole[start + 8 :])
        with pytest.raises(ModelError, match=message):
            inspect_checkpoint(path)


def test_headers_that_were_inspected_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    info, plain = inspect_checkpoint(LLAMA), load(LLAMA)
    monkeypatch.setattr("jaxkv.models.checkpoint._open", None)
    assert load_tokenizer(info) is None
    loaded = load_checkpoint(info, dtype="float32", mesh=one_device())
    assert same_weights(loaded.model, plain.model)
    assert loaded.weights_sha256 == plain.weights_sha256


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_converted_checkpoint_is_bit_for_bit_what_its_source_gives(tmp_path: Path, dtype: str) -> None:
    steps: list[tuple[int, int]] = []
    folder = save_converted(LLAMA, tmp_path / "converted", dtype, lambda done, total: steps.append((done, total)))
    assert steps[-1] == (29, 29)
    converted, source = load(folder, dtype), load(LLAMA, dtype)
    assert same_weights(converted.model, source.model)
    assert (converted.config, converted.eos_ids) == (source.config, source.eos_ids)
    assert converted.weights_sha256 == source.weights_sha256
    info = inspect_checkpoint(folder)
    assert (info.format, info.config, info.has_tokenizer) == ("orbax", source.config, False)


def test_weights_that_went_through_a_narrower_dtype_are_other_weights(tmp_path: Path) -> None:
    narrow = save_converted(LLAMA, tmp_path / "narrow", "bfloat16")
    assert load(narrow, "float32").weights_sha256 != load(LLAMA).weights_sha256
    assert load(narrow, "bfloat16").weights_sha256 == load(LLAMA, "bfloat16").weights_sha256
    wide = save_converted(LLAMA, tmp_path / "wide", "float32")
    assert same_weights(load(wide, "bfloat16").model, load(LLAMA, "bfloat16").model)
    assert load(wide, "bfloat16").weights_sha256 == load(LLAMA, "bfloat16").weights_sha256


def test_a_converted_checkpoint_loads_onto_two_devices(tmp_path: Path, run_python) -> None:
    folder = save_converted(LLAMA, tmp_path / "converted", "float32")
    source = f"""
import jax, numpy as np
from jax.sharding import Mesh
from jaxkv.models import load_checkpoint
model = load_checkpoint({str(folder)!r}, dtype="float32", mesh=Mesh(np.array(jax.devices()), ("tensor",))).model
print([shard.data.shape for shard in model.layers[0].mlp.gate.weight[...].addressable_shards])
"""
    assert run_python(source, devices=2).strip() == "[(48, 64), (48, 64)]"


def test_converting_leaves_nothing_behind_when_it_fails_and_overwrites_nothing(tmp_path: Path) -> None:
    folder = save_converted(LLAMA, tmp_path / "converted", "float32")
    with pytest.raises(ModelError, match=r"converted exists already; remove it or choose another folder"):
        save_converted(LLAMA, folder, "float32")
    with pytest.raises(ModelError, match=r"is converted already; give the GGUF file or the Hugging Face folder"):
        save_converted(folder, tmp_path / "again", "float32")
    broken = llama_copy(tmp_path)
    (broken / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a tokenizer file"):
        save_converted(broken, tmp_path / "other", "float32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "converted"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"file/converted cannot be written: "):
        save_converted(LLAMA, tmp_path / "file" / "converted", "float32")


def test_a_damaged_converted_checkpoint_says_to_convert_again(tmp_path: Path) -> None:
    folder = save_converted(LLAMA, tmp_path / "converted", "float32")
    description = json.loads((folder / "jaxkv.json").read_text())
    for damage, message in (({"format": 99}, r"is not of format 1"), ({"config": {}}, r"is damaged"), ({"more": 1}, r"is damaged")):
        write_json(folder / "jaxkv.json", {**description, **damage})
        with pytest.raises(ModelError, match=message + ".*convert the original again"):
            inspect_checkpoint(folder)
    write_json(folder / "jaxkv.json", description)
    subprocess.run(["rm", "-r", str(folder / "weights")], check=True)
    with pytest.raises(ModelError, match=r"weights cannot be read: .*convert the original again"):
        load(folder)
