"""Hugging Face's tensors that several of our parameters lie in, and which rows each takes. Knows no files.

Rows are cut from every group of a tensor by themselves. Two groups of rows (q k | q k), 2 for q and 3 for k:

    row    0 1 2 3 4   5 6 7 8 9
    q      0 1         5 6
    k          2 3 4       7 8 9
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from jaxkv.models.config import ModelConfig, Recurrent
from jaxkv.models.load_hf_names import draft_key

DELTA = "model.layers.{}.linear_attn."
MIXER = "backbone.layers.{}.mixer."
PACKED = "mlp.experts.gate_up_proj"


@dataclass(frozen=True, slots=True)
class Part:
    """The parameter `path`: rows start to stop of `num_groups` groups of `size` rows, along an axis of the tensor `key`."""

    path: str
    key: str
    start: int
    stop: int
    size: int
    num_groups: int = 1
    axis: int = 0

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The parameter's, where the tensor has as many rows as it should; else the tensor's own, which fits nothing."""
        if len(whole) <= self.axis or whole[self.axis] != self.num_groups * self.size:
            return whole
        return (*whole[: self.axis], self.num_groups * (self.stop - self.start), *whole[self.axis + 1 :])

    def cut(self, whole: np.ndarray) -> np.ndarray:
        before, after = whole.shape[: self.axis], whole.shape[self.axis + 1 :]
        groups = whole.reshape(*before, self.num_groups, self.size, *after)
        taken = groups[(slice(None),) * (self.axis + 1) + (slice(self.start, self.stop),)]
        return np.ascontiguousarray(taken.reshape(*before, -1, *after))


def tensor_parts(config: ModelConfig, *, packed: bool = False) -> list[Part]:
    """Every parameter of this config that is a part of a tensor. `packed`: the experts of a layer lie in one."""
    parts = [part for layer in range(config.num_layers) for part in _layer_parts(config, layer, packed)]
    if config.model_type != "draft_head":
        return parts
    return [replace(part, key=draft_key(part.key), path=part.path.replace("layers.0.", "layer.")) for part in parts]


def _layer_parts(config: ModelConfig, layer: int, packed: bool) -> Iterator[Part]:
    recurrent = config.recurrent
    if recurrent is not None and layer in recurrent.layers:
        for key, names, sizes, num_groups in _recurrent_cuts(config.model_type, recurrent):
            yield from _cuts(key.format(layer), [name.format(layer) for name in names], sizes, num_groups)
    if packed and (experts := config.experts_of(layer)):
        paths = [f"layers.{layer}.mlp.{name}.weight" for name in ("gate", "up")]
        yield from _cuts(f"model.layers.{layer}.{PACKED}", paths, [experts.ffn_dim] * 2, axis=1)


def _recurrent_cuts(model_type: str, made: Recurrent) -> Iterator[tuple[str, list[str], list[int], int]]:
    """Per tensor its name, the parameters in it, the rows of each in a group, and how many groups there are."""
    inner, groups, shared = made.inner_dim, made.num_groups, made.num_groups * made.state_dim
    if made.kind != "delta":
        names, sizes = (["x", "z"], [inner, inner]) if made.kind == "mamba" else (["z", "x", "put", "get", "step"], [])
        sizes = sizes or [inner, inner, shared, shared, made.num_heads]
        for kind in ("weight", "bias") if made.bias else ("weight",):
            yield f"{MIXER}in_proj.{kind}", [f"layers.{{}}.mixer.{name}.{kind}" for name in names], sizes, 1
    elif model_type == "qwen3_next":
        per_group = made.num_heads // groups
        values = per_group * made.head_dim
        names = [f"layers.{{}}.attn.{name}.weight" for name in ("q", "k", "v", "z", "beta", "step")]
        yield f"{DELTA}in_proj_qkvz.weight", names[:4], [made.state_dim, made.state_dim, values, values], groups
        yield f"{DELTA}in_proj_ba.weight", names[4:], [per_group, per_group], groups
    else:
        yield f"{DELTA}in_proj_qkv.weight", [f"layers.{{}}.attn.{name}.weight" for name in "qkv"], [shared, shared, inner], 1


def _cuts(key: str, paths: Sequence[str], sizes: Sequence[int], num_groups: int = 1, axis: int = 0) -> Iterator[Part]:
    stops = list(accumulate(sizes))
    for path, size, stop in zip(paths, sizes, stops, strict=True):
        yield Part(path, key, stop - size, stop, stops[-1], num_groups, axis)
