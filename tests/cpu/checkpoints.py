"""Small checkpoints for tests: the fixtures in a folder of their own, as shards, as a GGUF file."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from jaxkv.models import Checkpoint, dense_logits, load_checkpoint

FIXTURES = Path(__file__).parents[1] / "fixtures"
LLAMA = FIXTURES / "llama"
TOLERANCE = 2e-4  # absolute, float32


def one_device() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]), ("tensor",))


def load(path: Path, dtype: str = "float32") -> Checkpoint:
    return load_checkpoint(path, dtype=dtype, mesh=one_device())


def llama_copy(folder: Path, config: str = "config.json", **changes: Any) -> Path:
    """The llama fixture in a folder that a test may damage, with keys of its config changed (None removes one)."""
    return fixture_copy("llama", folder, config, **changes)


def fixture_copy(name: str, folder: Path, config: str = "config.json", **changes: Any) -> Path:
    """The same of any fixture."""
    target = folder / "checkpoint"
    target.mkdir()
    for file in ("generation_config.json", "model.safetensors"):
        shutil.copy(FIXTURES / name / file, target / file)
    data = {**json.loads((FIXTURES / name / config).read_text()), **changes}
    write_json(target / "config.json", {key: value for key, value in data.items() if value is not None})
    return target


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data), encoding="utf-8")


def change_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def reference(name: str = "llama") -> Mapping[str, np.ndarray]:
    """What transformers computed in float32 for a fixture's two prompts."""
    return dict(np.load(FIXTURES / name / "reference.npz"))


def logits(model: Any, tokens: Any) -> np.ndarray:
    return np.asarray(dense_logits(model, jnp.asarray(tokens, jnp.int32)))


def permute(w: np.ndarray, num_heads: int) -> np.ndarray:
    """Query or key rows as llama.cpp's converter writes them."""
    out, into = w.shape
    return w.reshape(num_heads, 2, out // num_heads // 2, into).swapaxes(1, 2).reshape(out, into)


GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def write_gguf(path: Path, arch: str = "llama", metadata: Callable[[gguf.GGUFWriter], None] | None = None, skip: str = "") -> Path:
    """The llama fixture as a GGUF file, as llama.cpp's converter would write it."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(3)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_eos_token_id(2)
    if metadata is not None:
        metadata(writer)
    for name, tensor in load_file(LLAMA / "model.safetensors").items():
        heads = 4 if "q_proj" in name else 2 if "k_proj" in name else None
        renamed = name
        for old, new in GGUF_NAMES.items():
            renamed = renamed.replace(old, new)
        if renamed != skip:
            writer.add_tensor(renamed, tensor if heads is None else permute(tensor, heads))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
