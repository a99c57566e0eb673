"""How large the states of recurrent layers are, from the numbers of a model alone. Imports neither JAX nor Flax.

A layer of attention keeps keys and values of every token, in pages. A recurrent layer keeps one state per sequence, whose size no token
changes: a window of the last inputs of its convolution, and a sum over everything before.
"""

import math
from dataclasses import dataclass

from jaxkv.models.config import ModelConfig

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class StateShape:
    """One array of one sequence's state in one layer; zeros before the first token."""

    shape: tuple[int, ...]
    dtype: str
    split: int | None  # the axis that is split over the mesh's axis "tensor"; None where every device has all of it

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * WIDTHS[self.dtype]


LayerState = tuple[StateShape, ...]


def state_shapes(config: ModelConfig, dtype: str) -> tuple[LayerState, ...]:
    """One entry for every layer that keeps a state, in the order of the layers: its convolution's window in the model's dtype, its sum in
    float32. Nothing where no layer keeps one."""
    made = config.recurrent
    if made is None:
        return ()
    window = StateShape((made.conv_len - 1, made.conv_dim), dtype, None)
    total = StateShape(made.sum_shape, "float32", 1 if made.kind == "mamba" else 0)
    return ((window, total),) * len(config.state_layers)


def state_bytes(config: ModelConfig, dtype: str) -> int:
    """What one sequence's states take in all layers together, whatever its length."""
    return sum(shape.num_bytes for layer in state_shapes(config, dtype) for shape in layer)
