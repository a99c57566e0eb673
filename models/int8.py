"""Weights in int8: whole numbers, and for each output channel one float32 that its results are multiplied with. Activations stay wide.

    y = (x @ numbers) * scale        instead of        y = x @ weight

Which layers: the products of attention, feed-forward parts, experts and mixers, in every family. Not the embedding and the head, and none
of the small products that steer (KEPT): which experts a token visits, and how much a recurrent layer forgets.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.models.experts import ExpertLinear
from jaxkv.models.layers import Linear

KEPT = frozenset({"router", "shared_gate", "beta", "step", "mix", "step_size"})  # names of layers whose weights stay in the model's dtype
LARGEST = 127  # -128 is left out, so that w and -w are stored alike
SCALE = "channel_scale"


def narrow(model: nnx.Module) -> None:
    """Give every layer that takes part parameters in int8 with scales, all 0 and 1; for a model whose parameters are shapes."""
    for path, layer in list(nnx.iter_graph(model)):
        if isinstance(layer, Linear | ExpertLinear) and path[-1] not in KEPT:
            kind = "weight" if hasattr(layer, "weight") else "kernel"
            shape = getattr(layer, kind)[...].shape
            setattr(layer, kind, nnx.Param(jnp.zeros(shape, jnp.int8)))
            channels = (*shape[:-2], shape[-2] if kind == "weight" else shape[-1])
            setattr(layer, SCALE, nnx.Param(jnp.ones(channels, jnp.float32)))


def quantised(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A weight [..., out, in] as whole numbers from -127 to 127 and the scale [..., out] of each channel."""
    wide = weight.astype(np.float32)
    scale = np.maximum(np.abs(wide).max(-1) / np.float32(LARGEST), np.finfo(np.float32).tiny)
    return np.rint(wide / scale[..., None]).astype(np.int8), scale


def scale_path(path: str) -> str:
    """The parameter with the scales of a weight, "layers.0.attn.q.channel_scale"."""
    return f"{path.rpartition('.')[0]}.{SCALE}"


def is_scale(path: str) -> bool:
    """Whether a parameter is one of those."""
    return path.endswith(f".{SCALE}")
