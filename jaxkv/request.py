"""What a caller asks of the engine and what comes back. Knows nothing of rows, pages or programs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxkv.constraint import Constraint

MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_CHOICES = 128
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is answered: all but its prompt.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `logprobs` None reports none, k >= 0 reports the chosen token's
    and those of the k most likely (natural log of the model's own distribution, before penalties, bias and temperature); `prompt_logprobs`
    does so for the prompt's own tokens, all of which are computed then, whatever is in the pool. With `max_tokens` 0 the prompt is read and
    nothing said. `skip_special_tokens` keeps special tokens out of the text. `n` choices have a random key each. `cache_prompt` and
    `cache_salt` say with whom computed prompt pages may be shared; no answer depends on it.

    With `context_shift` a context of `context_len` tokens (None: the model's limit) that is full drops the `n_discard` after the first
    `n_keep` (both in whole pages, rounded up; None: half of what is not kept) and goes on, so that `max_tokens` alone limits the answer.
    Penalties then look at what the context holds.

    With a `constraint` the whole answer has its form: the end of text is possible where the form is complete, and once nothing can follow
    the answer ends with "stop", even below `min_tokens`; `max_tokens` may still cut it. `bad_words` are texts that the answer never
    contains. Both choose among the model's tokens and leave the logprobs what they were.
    """

    max_tokens: int | None = None  # None: until a stop or the longest possible
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # 0 .. 2**64 - 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n: int = 1
    priority: int = 0  # lower is served first, and may have others parked; no answer depends on it
    patient: bool = False  # nobody waits for the next token, only for the whole: prompts may go first; no answer depends on it
    cache_prompt: bool = True
    cache_salt: str = ""  # requests with different ones share nothing
    context_shift: bool = False
    context_len: int | None = None
    n_keep: int = 0
    n_discard: int | None = None
    constraint: Constraint | None = None
    bad_words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token's logprob, and the most likely tokens with theirs, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Completion:
    """The answer to one request, or one choice of it. `finish_reason` is stop, length, cancelled or error (then `error` says why)."""

    token_ids: list[int]
    text: str
    finish_reason: str
    prompt_tokens: int
    seed: int
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    choice: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # one for each token of the prompt; None for the first, which follows nothing
    cached_tokens: int = 0  # of the prompt, found in the pool: depends on who was there before
    num_parks: int = 0
    pause_s: float = 0.0  # time spent off the device, all parks together
    ttft_s: float | None = None
    e2e_s: float = 0.0
