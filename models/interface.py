"""What a model asks for and offers, as types. Knows no family and no cache.

A layer keeps something of every token, or one state for each sequence, and sees neither pages nor slots: it calls `attend` or `advance`,
which know where things lie. The cache is opaque to the model and goes from call to call. The t tokens of a call are one token of each of
t rows, or a run of one sequence; only these two functions know which.
"""

from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxkv.models.config import ModelConfig

Inputs = tuple[Array, ...]  # of a recurrent layer: arrays of any shape behind an axis that counts tokens
State = tuple[Array, ...]  # arrays as `state_shapes` gives them for the layer


@runtime_checkable
class Attend(Protocol):
    """Attention as an argument: stores the new keys and values in `cache`, attends, and returns the new cache.

    `layer` counts the layers that have keys, from 0. With a window of w a token sees itself and the w - 1 before it.
    """

    def __call__(
        self,
        layer: int,
        q: Float[Array, "t h d"],
        k: Float[Array, "t k d"],
        v: Float[Array, "t k d"],
        cache: Any,
        *,
        scale: float,
        window: int | None = None,
    ) -> tuple[Float[Array, "t h d"], Any]: ...


@runtime_checkable
class Recurrence(Protocol):
    """What a recurrent layer makes of its inputs and a state, without knowing where that lies. Before the first token all is zeros.

    The order of tokens is all it knows, no positions. A row of `step` and a token of `chunk` depend on nobody else's inputs, bit for bit;
    the two need not agree in the last bit, so each token has to come the same way every time.
    """

    def step(self, inputs: Inputs, states: State) -> tuple[Float[Array, "b ..."], State]:
        """One token of each of b sequences; states have the axis b in front. b is fixed, and at least 2."""

    def chunk(self, inputs: Inputs, state: State, num_valid: Int[Array, ""]) -> tuple[Float[Array, "t ..."], State]:
        """The next t tokens of one sequence. What comes after the first `num_valid` changes neither the state nor the others' outputs."""


@runtime_checkable
class Advance(Protocol):
    """Recurrence as an argument: takes the states out of `cache`, lets `mixer` step or go through a chunk, and puts them back.

    `layer` counts the layers that keep a state, from 0.
    """

    def __call__(self, layer: int, mixer: Recurrence, inputs: Inputs, cache: Any) -> tuple[Float[Array, "t ..."], Any]: ...


@runtime_checkable
class LanguageModel(Protocol):
    """Every family's module: hidden states and cache from tokens, logits from hidden states.

    Its config says which layers have keys and which a state, `page_layers` and `state_layers`, and `state_shapes` how large that is.
    `advance` may be None where no layer has a state; where every layer has one, `attend` is not called. A family whose keys simply turn
    with their position may also have `move_keys` (as `Decoder` does); without it no context can shift, and none with a state has it.
    """

    config: ModelConfig
    dtype: jnp.dtype

    def __call__(
        self, tokens: Int[Array, " t"], positions: Int[Array, " t"], cache: Any, attend: Attend, advance: Advance | None = None
    ) -> tuple[Float[Array, "t m"], Any]: ...

    def logits(self, hidden: Float[Array, "t m"]) -> Float[Array, "t v"]: ...

    @staticmethod
    def partition(path: str, shape: tuple[int, ...], num_shards: int) -> PartitionSpec: ...
