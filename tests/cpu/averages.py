"""A family of recurrent layers that exists for tests alone: fading averages of what was seen, beside attention or all by themselves.

It is as small as a model with states can be. A layer's state is a window of its last inputs and a float32 matrix that fades, so a test sees
at once when one is lost, mixed up, or touched by padding: what comes out depends on every token before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array

from jaxkv.models.config import ModelConfig, Recurrent, Rope
from jaxkv.models.decoder import Attention, Block, Stack, stream_norm
from jaxkv.models.families import FAMILIES
from jaxkv.models.layers import GatedMLP, Linear, as_rows, works_in_columns
from jaxkv.models.load_orbax import Description, write_converted
from jaxkv.models.parameters import flat_parameters

VOCAB, DIM, WIDTH, STATE_DIM, WINDOW = 320, 16, 8, 4, 3


class Averages(nnx.Module):
    """x + out(what a fading average over the window's means gives back), for a layer that keeps a state."""

    def __init__(self, config: ModelConfig, layer: int, dtype: jnp.dtype):
        self.place = config.place_of(layer)
        self.norm = stream_norm(config, dtype)
        self.into = Linear(DIM, WIDTH + 2 * STATE_DIM, dtype)
        self.out = Linear(WIDTH, DIM, dtype)

    def __call__(self, x: Array, angles: Any, cache: Any, advance: Any) -> tuple[Array, Any]:
        rows = as_rows(self.into(self.norm(x)))
        inputs = (rows[:, :WIDTH], rows[:, WIDTH : WIDTH + STATE_DIM], rows[:, WIDTH + STATE_DIM :])
        made, cache = advance(self.place, self, inputs, cache)
        made = made.astype(x.dtype)
        return x + self.out(made.T if works_in_columns(x.dtype) else made), cache

    def step(self, inputs: tuple[Array, ...], states: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
        """[b, ...] each."""
        values, keys, queries = (x.astype(jnp.float32) for x in inputs)
        window, matrix = states
        seen = jnp.concatenate([window, inputs[0][:, None].astype(window.dtype)], axis=1)
        mean = jnp.tanh(seen.astype(jnp.float32).mean(1) + values)
        matrix = 0.9 * matrix + keys[:, :, None] * mean[:, None, :]
        return (matrix * queries[:, :, None]).sum(1), (seen[:, 1:], matrix)

    def chunk(self, inputs: tuple[Array, ...], state: tuple[Array, ...], num_valid: Array) -> tuple[Array, tuple[Array, ...]]:
        """Token by token; those after `num_valid` change nothing."""

        def turn(carry: tuple[Array, ...], token: tuple[Array, tuple[Array, ...]]) -> tuple[tuple[Array, ...], Array]:
            at, one = token
            made, new = self.step(tuple(x[None] for x in one), tuple(x[None] for x in carry))
            return tuple(jnp.where(at < num_valid, x[0], old) for x, old in zip(new, carry, strict=True)), made[0]

        after, made = lax.scan(turn, state, (jnp.arange(inputs[0].shape[0]), inputs))
        return made, after


class AveragesModel(Stack):
    """Layers that keep a state where the config says so, else attention."""

    @staticmethod
    def make_block(config: ModelConfig, layer: int, dtype: jnp.dtype) -> Any:
        if layer in config.state_layers:
            return Averages(config, layer, dtype)
        return Block(config, dtype, Attention(config, layer, dtype), GatedMLP(config.hidden_dim, config.ffn_dim, dtype))


def model_config(num_layers: int, layers: tuple[int, ...]) -> ModelConfig:
    return ModelConfig(
        model_type="averages", vocab_size=VOCAB, num_layers=num_layers, hidden_dim=DIM, num_heads=2, num_kv_heads=1, head_dim=8, ffn_dim=32,
        max_position=512, norm_eps=1e-5, rope=Rope(), tie_embeddings=True, dtype="float32",
        recurrent=Recurrent("mamba", layers, 1, WIDTH, 1, STATE_DIM, WINDOW + 1),
    )  # fmt: skip


@contextmanager
def family() -> Iterator[None]:
    """While it lasts, there is such a family."""
    FAMILIES["averages"] = f"{__name__}:AveragesModel"
    yield
    del FAMILIES["averages"]


def write_checkpoint(folder: Path, num_layers: int, layers: tuple[int, ...]) -> Path:
    """A model with random weights; `layers` are those that keep a state."""
    config, rng = model_config(num_layers, layers), np.random.default_rng(len(layers))
    model = AveragesModel(config, jnp.dtype("float32"))
    arrays = {
        path: jax.device_put(rng.normal(0, 1.0, array.shape).astype(np.float32)) if path.endswith(("weight", "table")) else array
        for path, array in flat_parameters(nnx.state(model)).items()
    }
    path = folder / f"averages-{num_layers}-{len(layers)}"
    write_converted(path, Description(config, frozenset({2}), "float32", f"{num_layers} {layers}", "made up"), arrays, None)
    return path
