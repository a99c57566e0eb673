"""What the server asks of an engine. `jaxkv.engine.Engine` and `jaxkv.testing.FakeEngine` both answer to it."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxkv.openai.prompts import Tokenizer
from jaxkv.request import Completion, SamplingParams


class ServeHandle(Protocol):
    """A sequence in progress."""

    @property
    def seq_id(self) -> int: ...

    @property
    def completion(self) -> Completion | None: ...

    @property
    def will_truncate_at(self) -> int | None: ...

    @property
    def stats(self) -> Any: ...

    def cancel(self) -> Any: ...


class ServeEngine(Protocol):
    """Takes requests and advances all of them step by step; only `prepare` may be called by another thread than the one that steps."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def model_config(self) -> Any: ...

    @property
    def capacity(self) -> int: ...

    @property
    def longest_prompt(self) -> int: ...

    @property
    def max_len(self) -> int: ...

    @property
    def system_fingerprint(self) -> str: ...

    @property
    def messages(self) -> list[str]: ...

    @property
    def stats(self) -> Any: ...

    @property
    def is_idle(self) -> bool: ...

    def prepare(self, params: SamplingParams) -> Any: ...

    def submit_group(self, prompt: Sequence[int], params: SamplingParams, *, on_token: Any = None, name: str | None = None) -> Any: ...

    def live(self, seq_id: int) -> Any: ...

    def step(self) -> Any: ...

    def status(self) -> Any: ...

    def close(self) -> Any: ...


CheckWanted = Callable[[], None]
EngineFactory = Callable[[CheckWanted], ServeEngine]
