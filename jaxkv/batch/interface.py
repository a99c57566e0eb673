"""What a batch job asks of an engine and of a configuration. `jaxkv.engine.Engine` and `jaxkv.testing.FakeEngine` both answer to it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from jaxkv.openai.prompts import Tokenizer
from jaxkv.request import Completion, SamplingParams


class ModelFacts(Protocol):
    """The sizes of the model."""

    @property
    def vocab_size(self) -> int: ...


class BatchHandle(Protocol):
    """A request in progress."""

    @property
    def completion(self) -> Completion | None: ...

    @property
    def will_truncate_at(self) -> int | None: ...

    def cancel(self) -> Any: ...


class BatchGroup(Protocol):
    """The choices of one prompt, in order."""

    @property
    def choices(self) -> Sequence[BatchHandle]: ...


class BatchEngine(Protocol):
    """Takes requests and advances all of them step by step."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def model_config(self) -> ModelFacts: ...

    @property
    def system_fingerprint(self) -> str: ...

    @property
    def messages(self) -> list[str]: ...

    def submit_group(self, prompt_ids: Sequence[int], params: SamplingParams, *, name: str | None = None) -> BatchGroup: ...

    def step(self) -> Any: ...

    def status(self) -> Any: ...

    def summary(self) -> dict[str, Any]: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> Any: ...


EngineFactory = Callable[[], BatchEngine]


@dataclass(frozen=True, slots=True)
class Inspected:
    """What is known of a model before its weights are read; `facts` is what an engine's answers will depend on, as far as it is known."""

    vocab_size: int
    has_tokenizer: bool
    facts: Mapping[str, Any]


Inspect = Callable[[], Inspected]
