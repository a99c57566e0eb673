"""What a model asks for and offers, as types. Knows no family and no cache."""

from typing import Any, Protocol, runtime_checkable

from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int


@runtime_checkable
class Attend(Protocol):
    """Attention as an argument: stores the new keys and values in `cache`, attends, and returns the new cache.

    The cache is opaque to the model. The t tokens are one token of each of t rows, or a run of one sequence; only the attend function
    knows which. With a window of w a token sees itself and the w - 1 before it.
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
class LanguageModel(Protocol):
    """Every family's module: hidden states and cache from tokens, logits from hidden states.

    A family whose keys simply turn with their position may also have `move_keys` (as `Decoder` does); without it no context can shift.
    """

    def __call__(
        self, tokens: Int[Array, " t"], positions: Int[Array, " t"], cache: Any, attend: Attend
    ) -> tuple[Float[Array, "t m"], Any]: ...

    def logits(self, hidden: Float[Array, "t m"]) -> Float[Array, "t v"]: ...

    @staticmethod
    def partition(path: str, shape: tuple[int, ...], num_shards: int) -> PartitionSpec: ...
