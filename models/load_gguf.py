"""GGUF files of architecture llama. The only place with GGUF's metadata keys and tensor names."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxkv.models.config import ModelConfig, Rope, read_count
from jaxkv.models.errors import ModelError
from jaxkv.models.gguf_file import GgufFile, GgufTensor, read_gguf
from jaxkv.models.hf_tokenizer import HfTokenizer, bpe_tokenizer
from jaxkv.models.parameters import OnTensor, Stages, Tensor, check_names, check_shapes, hash_files, place_tensors

ARCHITECTURES = ("llama",)
TOP = {"token_embd.weight": "embed.table", "output_norm.weight": "norm.scale"}
HEAD = {"output.weight": "head.table"}
LAYER = {
    "blk.{}.attn_norm.weight": "layers.{}.attn_norm.scale",
    "blk.{}.attn_q.weight": "layers.{}.attn.q.weight",
    "blk.{}.attn_k.weight": "layers.{}.attn.k.weight",
    "blk.{}.attn_v.weight": "layers.{}.attn.v.weight",
    "blk.{}.attn_output.weight": "layers.{}.attn.o.weight",
    "blk.{}.ffn_norm.weight": "layers.{}.mlp_norm.scale",
    "blk.{}.ffn_gate.weight": "layers.{}.mlp.gate.weight",
    "blk.{}.ffn_up.weight": "layers.{}.mlp.up.weight",
    "blk.{}.ffn_down.weight": "layers.{}.mlp.down.weight",
}
CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type


@dataclass(frozen=True)
class GgufModel:
    """What a file says of itself before any weight is read."""

    file: GgufFile
    config: ModelConfig
    eos_ids: frozenset[int]

    format = "gguf"
    weight_dtype = None

    @property
    def has_tokenizer(self) -> bool:
        return "tokenizer.ggml.tokens" in self.file.metadata

    @property
    def weights_bytes(self) -> int:
        return self.file.path.stat().st_size

    def check(self) -> None:
        self.tensors()

    def load(self, dtype: str, mesh: Mesh, stages: Stages, on_tensor: OnTensor | None = None, weight_dtype: str | None = None) -> Any:
        return place_tensors(self.config, dtype, mesh, self.tensors(), stages, on_tensor, weight_dtype)

    def tokenizer(self) -> HfTokenizer | None:
        return gguf_tokenizer(self.file)

    def weights_sha256(self, dtype: str) -> str:
        return hash_files([self.file.path])

    def tensors(self) -> list[Tensor]:
        """Every parameter's tensor; refuses missing, left-over and misshapen ones."""
        names = dict(TOP) if self.config.tie_embeddings else TOP | HEAD
        names |= {key.format(i): path.format(i) for i in range(self.config.num_layers) for key, path in LAYER.items()}
        check_names(names, self.file.tensors, str(self.file.path))
        tensors = [_tensor(key, path, self.file.tensors[key], self.config) for key, path in names.items()]
        check_shapes(self.config, tensors, str(self.file.path))
        return tensors


def open_gguf(path: Path) -> GgufModel:
    """Read the metadata and tensor list of a GGUF file."""
    file = read_gguf(path)
    meta = file.metadata
    eos_ids = frozenset(meta[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in meta)
    return GgufModel(file, _read_config(file), eos_ids)


def gguf_tokenizer(file: GgufFile) -> HfTokenizer | None:
    """The tokenizer of a file's metadata, or None if it has none."""
    meta, where = file.metadata, str(file.path)
    if "tokenizer.ggml.tokens" not in meta:
        return None
    kind = meta.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(f"{where}: tokenizer model {kind!r} is not supported; supported is: gpt2 (byte-level BPE)")
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    kinds: list[int] = meta.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    bos, eos = (meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    return bpe_tokenizer(
        tokens=tokens,
        merges=meta["tokenizer.ggml.merges"],
        pre=meta.get("tokenizer.ggml.pre", "default"),
        special={tokens[i] for i, kind in enumerate(kinds) if kind == CONTROL},
        added={tokens[i] for i, kind in enumerate(kinds) if kind == USER_DEFINED},
        bos=None if bos is None else tokens[bos],
        eos=None if eos is None else tokens[eos],
        add_bos=meta.get("tokenizer.ggml.add_bos_token", False),
        chat_template=meta.get("tokenizer.chat_template"),
        where=where,
    )


def unpermute(w: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's reordering of query and key rows, which serves interleaved rotary pairs where ours are half-split.

    Example head_dim 4: the file holds a head's rows as 0, 2, 1, 3 and they come back as 0, 1, 2, 3.
    """
    out, into = w.shape
    return w.reshape(num_heads, out // num_heads // 2, 2, into).swapaxes(1, 2).reshape(out, into)


def _read_config(file: GgufFile) -> ModelConfig:
    meta, where = file.metadata, str(file.path)
    arch = meta.get("general.architecture")
    if arch not in ARCHITECTURES:
        known = f"supported are: {', '.join(ARCHITECTURES)} (for other families use a Hugging Face folder)"
        raise ModelError(f"{where}: GGUF architecture {arch!r} is not supported; {known}")

    def count(key: str, default: int | None = None) -> int:
        return read_count(meta, where, f"{arch}.{key}", default)

    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{where}: the tensor 'token_embd.weight' is missing")
    num_heads, hidden_dim = count("attention.head_count"), count("embedding_length")
    head_dim = count("attention.key_length", hidden_dim // num_heads)
    if (rotated := count("rope.dimension_count", head_dim)) != head_dim:
        raise ModelError(f"{where}: rotating {rotated} of {head_dim} head dims is not supported")
    return ModelConfig(
        model_type=arch,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        num_layers=count("block_count"),
        hidden_dim=hidden_dim,
        num_heads=num_heads,
        num_kv_heads=count("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        ffn_dim=count("feed_forward_length"),
        max_position=count("context_length"),
        norm_eps=float(meta.get(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)),
        rope=_read_rope(meta, arch),
        tie_embeddings="output.weight" not in file.tensors,
        dtype="float32",  # what block formats are computed from; the file is narrower
    )


def _read_rope(meta: dict[str, Any], arch: str) -> Rope:
    theta, kind = meta.get(f"{arch}.rope.freq_base", 10000.0), meta.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return Rope(theta)
    return Rope(theta, kind, meta.get(f"{arch}.rope.scaling.factor", 1.0))


def _tensor(key: str, path: str, tensor: GgufTensor, config: ModelConfig) -> Tensor:
    heads = {"q": config.num_heads, "k": config.num_kv_heads}.get(path.split(".")[-2])
    if heads is None:
        return Tensor(path, key, tensor.shape, tensor.read, tensor.dequantize)
    return Tensor(path, key, tensor.shape, tensor.read, lambda raw: unpermute(tensor.dequantize(raw), heads))
