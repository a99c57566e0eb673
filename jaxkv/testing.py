"""Stand-ins for tests, ours and yours: a tokenizer of bytes and an engine that needs no model, no JAX and no device.

`FakeEngine` has the interface of `jaxkv.engine.Engine` and answers with tokens that depend on the prompt and the seed alone, several
requests at a time and in rotation, so that what is built on top sees the same order of events. It owns no memory and parks nothing.
"""

import codecs
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from jaxkv.errors import RequestError
from jaxkv.output import Output
from jaxkv.request import Completion, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from jaxkv.guides import Guides

EOS_ID = 256
NUM_IDS = 257


class ByteTokenizer:
    """One token per byte of UTF-8, and token 256 for the end of a text; a chat renders as one `role: content` line per message."""

    vocab_size = NUM_IDS
    knows_tools = False

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The bytes of `text`; there is no special token to add."""
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, with U+FFFD where they are no characters."""
        stream = self.stream(skip_special_tokens)
        return "".join(map(stream.step, ids)) + stream.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The one byte of a token."""
        return b"<end>" if token_id == EOS_ID else bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        """Whether it is the end of text."""
        return token_id == EOS_ID

    def stream(self, skip_special_tokens: bool = True) -> "ByteStream":
        """A fresh decoder."""
        return ByteStream(self, skip_special_tokens)

    def render_chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, tools: Any = None, **_: Any) -> str:
        """`user: hello` lines and an open `assistant: ` at the end."""
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + ("assistant: " if add_generation_prompt else "")


class ByteStream:
    """Gives text as soon as its characters are whole."""

    def __init__(self, tokenizer: ByteTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id: int) -> str:
        """The characters that this token completes."""
        if self._skip and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What is left: U+FFFD where the text ends inside a character."""
        return self._decoder.decode(b"", final=True)


@dataclass(frozen=True)
class FakeModelConfig:
    """The sizes that callers of an engine look at."""

    vocab_size: int = NUM_IDS
    model_type: str = "fake"


@dataclass(frozen=True)
class FakeStatus:
    """What is going on, as counts."""

    rows: int
    parked: int
    waiting: int
    tokens_per_s: float
    pool_pages: int = 0
    pool_pages_free: int = 0
    host_bytes: int = 0


class FakeHandle:
    """A request in progress."""

    def __init__(
        self,
        engine: "FakeEngine",
        prompt: Sequence[int],
        params: SamplingParams,
        answer: Iterator[int],
        limit: int,
        on_token: "OnToken | None",
        choice: int = 0,
    ) -> None:
        self.choice = choice
        self.completion: Completion | None = None
        self._on_token = on_token
        self.will_truncate_at = limit if params.max_tokens is None or params.max_tokens > limit else None
        self._engine, self._prompt, self._params, self._answer = engine, list(prompt), params, answer
        num = limit if params.max_tokens is None else min(params.max_tokens, limit)
        self._output = Output(engine.tokenizer, (EOS_ID,), params, max(1, num))
        self.prompt_logprobs = self._score() if params.prompt_logprobs is not None else None
        self._began = time.monotonic()
        self._first: float | None = None

    @property
    def token_ids(self) -> list[int]:
        """The token ids so far."""
        return self._output.token_ids

    @property
    def done(self) -> bool:
        """Whether it ended, in whatever way."""
        return self.completion is not None

    def cancel(self) -> None:
        """End it now; nothing happens to one that has ended."""
        if not self.done:
            self.end("cancelled")

    def result(self) -> Completion:
        """Run the engine until this request has ended."""
        while self.completion is None:
            self._engine.step()
        return self.completion

    def __iter__(self) -> Iterator[int]:
        """The token ids, as they are made."""
        given = 0
        while not self.done or given < len(self._output.token_ids):
            if given == len(self._output.token_ids):
                self._engine.step()
            else:
                yield self._output.token_ids[given]
                given += 1

    def advance(self) -> None:
        """Make one token; read the prompt, and no more, where none is asked for."""
        if self._params.max_tokens == 0:
            self.end("length")
            return
        token_id = next(self._answer)
        top = tuple(((token_id + index) % 256, -0.5 - index) for index in range(self._params.logprobs or 0))
        self._first = self._first or time.monotonic()
        reason = self._output.accept(token_id, TokenLogprobs(token_id, -0.5, top))
        if self._on_token is not None:
            self._on_token(self, token_id)
        if reason is not None and not self.done:
            self.end(reason)

    def end(self, reason: str, error: str | None = None) -> None:
        """Close the output and keep the completion."""
        out, now = self._output, time.monotonic()
        if out.finish_reason is None:
            out.finish(reason)
        ttft = None if self._first is None else self._first - self._began
        self.completion = Completion(
            out.token_ids, out.text, reason, len(self._prompt), self._params.seed, out.logprobs, error, self.choice,
            prompt_logprobs=self.prompt_logprobs, ttft_s=ttft, e2e_s=now - self._began,
        )  # fmt: skip

    def _score(self) -> list[TokenLogprobs | None]:
        """Logprobs of the prompt: -0.25 for every token, and alternatives that are less likely."""
        count = self._params.prompt_logprobs or 0
        tops = [(token, tuple(((token + index) % 256, -0.25 - index) for index in range(count))) for token in self._prompt[1:]]
        return [None, *(TokenLogprobs(token, -0.25, top) for token, top in tops)]


@dataclass(frozen=True)
class FakeGroup:
    """The choices of one request."""

    choices: list[FakeHandle]

    def cancel(self) -> None:
        """End what has not ended."""
        for handle in self.choices:
            handle.cancel()


OnToken = Callable[[FakeHandle, int], None]


class FakeEngine:
    """Answers like an engine, from thin air.

    `answers` maps a prompt (as text) to the answer's text; any other prompt gets letters drawn from prompt and seed, with an end after 3 to
    40 of them. `failing` names prompts whose request ends with an error. `step_s` makes every step last that long.
    """

    def __init__(
        self,
        *,
        answers: Mapping[str, str] | None = None,
        failing: Sequence[str] = (),
        rows: int = 4,
        capacity: int = 4096,
        step_s: float = 0.0,
        fingerprint: str = "fp_fake",
        has_tokenizer: bool = True,
        on_step: Callable[["FakeEngine"], None] | None = None,
    ) -> None:
        self.tokenizer = ByteTokenizer() if has_tokenizer else None
        self.model_config = FakeModelConfig()
        self.capacity = self.longest_prompt = self.max_len = capacity
        self.system_fingerprint = fingerprint
        self.messages: list[str] = []
        self.num_steps = self.num_tokens = self.num_live_peak = 0
        self.is_closed = False
        self._answers, self._failing = dict(answers or {}), {tuple(prompt.encode()) for prompt in failing}
        self._rows, self._step_s, self._on_step = rows, step_s, on_step
        self._live: list[FakeHandle] = []
        self._guides: Guides | None = None

    def prepare(self, params: SamplingParams) -> None:
        """Refuse a constraint that the engine would refuse; answers do not follow it."""
        if params.constraint is not None or params.bad_words:
            from jaxkv.guides import Guides

            self._guides = self._guides or Guides(self.tokenizer, NUM_IDS, (EOS_ID,))
            self._guides.prepare(params)

    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, on_token: OnToken | None = None, name: str | None = None
    ) -> FakeHandle:
        """Put a request in the line; raise RequestError for a prompt that can never fit."""
        return self.submit_group(prompt_ids, params, on_token=on_token, name=name).choices[0]

    def submit_group(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, on_token: OnToken | None = None, name: str | None = None
    ) -> FakeGroup:
        """Put a request with `params.n` choices in the line."""
        self.prepare(params)
        limit = self.capacity - len(prompt_ids) + 1
        if limit < 1:
            raise RequestError(f"the prompt needs {len(prompt_ids)} tokens, the pool has {self.capacity}: raise pool.tokens", "prompt")
        return FakeGroup([self._take(prompt_ids, params, limit, on_token, choice) for choice in range(params.n)])

    def _take(self, prompt_ids: Sequence[int], params: SamplingParams, limit: int, on_token: OnToken | None, choice: int) -> FakeHandle:
        handle = FakeHandle(self, prompt_ids, params, self._tokens(tuple(prompt_ids), params, choice), limit, on_token, choice)
        if tuple(prompt_ids) in self._failing:
            handle.end("error", "made to fail")
        self._live.append(handle)
        self.num_live_peak = max(self.num_live_peak, len(self._live))
        return handle

    def step(self) -> None:
        """One token for each of the first `rows` requests."""
        self._live = [handle for handle in self._live if not handle.done]
        if self._step_s:
            time.sleep(self._step_s)
        for handle in self._live[: self._rows]:
            handle.advance()
            self.num_tokens += 1
        self.num_steps += 1
        self._live = [handle for handle in self._live if not handle.done]
        if self._on_step is not None:
            self._on_step(self)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        return all(handle.done for handle in self._live)

    def generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """The completions of `prompts`, in their order."""
        each = [params or SamplingParams()] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        ids = [list(prompt.encode()) if isinstance(prompt, str) else prompt for prompt in prompts]
        groups = [self.submit_group(prompt, one) for prompt, one in zip(ids, each, strict=True)]
        return [handle.result() for group in groups for handle in group.choices]

    def status(self) -> FakeStatus:
        """How many run and how many wait."""
        running = min(self._rows, len(self._live))
        return FakeStatus(running, 0, len(self._live) - running, 0.0)

    def summary(self) -> dict[str, Any]:
        """The figures of an engine that never parks."""
        return {"num_parks": 0, "num_restores": 0, "num_compiles_after_warmup": 0, "system_fingerprint": self.system_fingerprint}

    def close(self) -> None:
        """Cancel what is left; a second time does nothing."""
        for handle in self._live:
            handle.cancel()
        self._live, self.is_closed = [], True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tokens(self, prompt: tuple[int, ...], params: SamplingParams, choice: int) -> Iterator[int]:
        """The answer's tokens without end: what `answers` says or letters, then the end of text, then letters again."""
        known = self._answers.get(bytes(token % 256 for token in prompt).decode(errors="replace"))
        letters = _letters(f"{prompt} {params.seed if params.temperature else None}{f' {choice}' if choice and params.temperature else ''}")
        yield from known.encode() if known is not None else (next(letters) for _ in range(3 + next(letters) % 38))
        if not params.ignore_eos:
            yield EOS_ID
        yield from letters


def _letters(text: str) -> Iterator[int]:
    """An endless run of lower-case letters and spaces that depends on `text` alone."""
    block = 0
    while True:
        yield from (b"abcdefghijklmnopqrstuvwxyz      "[byte % 32] for byte in hashlib.sha256(f"{block} {text}".encode()).digest())
        block += 1
