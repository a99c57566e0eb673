"""What a request may ask of the compiled programs. The wording of bodies is checked elsewhere; these limits hold for every caller."""

import math
import operator
from collections.abc import Collection, Sequence
from typing import Any

from jaxkv.errors import RequestError
from jaxkv.request import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_PRIORITY,
    MAX_REPETITION_PENALTY,
    MAX_TOP_LOGPROBS,
    MIN_PRIORITY,
    MIN_REPETITION_PENALTY,
    SamplingParams,
)
from jaxkv.sampling import MAX_BANNED

# What each number may be, so that no arithmetic of the sampler overflows or turns into NaN.
_RANGES = {
    "temperature": (0.0, 1e6),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-1e6, 1e6),
    "frequency_penalty": (-1e6, 1e6),
    "repetition_penalty": (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    "n": (1, MAX_CHOICES),
    "top_k": (0, 2**31 - 1),
    "seed": (0, 2**64 - 1),
    "priority": (MIN_PRIORITY, MAX_PRIORITY),
}


def check_request(prompt: Sequence[int], params: SamplingParams, vocab_size: int, eos_ids: Collection[int]) -> tuple[int, ...]:
    """Raise RequestError for what the programs cannot take; return the ids that min_tokens keeps away."""
    check_kind(prompt)
    if len(prompt) == 0:
        raise RequestError("prompt: got 0 tokens, allowed: at least 1", "prompt")
    if bad := [token for token in prompt if not 0 <= token < vocab_size]:
        raise RequestError(f"prompt: got token id {bad[0]}, allowed: 0 to {vocab_size - 1}", "prompt")
    if params.max_tokens is not None and params.max_tokens < 0:
        raise RequestError(f"max_tokens: got {params.max_tokens}, allowed: at least 0", "max_tokens")
    for name in ("logprobs", "prompt_logprobs"):
        if (count := getattr(params, name)) is not None and not 0 <= count <= MAX_TOP_LOGPROBS:
            raise RequestError(f"{name}: got {count}, allowed: 0 to {MAX_TOP_LOGPROBS}", name)
    for name, (low, high) in _RANGES.items():
        if not low <= (value := getattr(params, name)) <= high:  # a NaN is in no range
            raise RequestError(f"{name}: got {value}, allowed: {low} to {high}", name)
    if not isinstance(params.n, int):
        raise RequestError(f"n: got {params.n}, allowed: a whole number from 1 to {MAX_CHOICES}", "n")
    if isinstance(params.priority, bool) or not isinstance(params.priority, int):
        raise RequestError(f"priority: got {params.priority!r}, allowed: a whole number, lower is served first", "priority")
    if len(params.logit_bias) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias: got {len(params.logit_bias)} entries, allowed: at most {MAX_LOGIT_BIAS}", "logit_bias")
    if bad := [token for token in params.logit_bias if not 0 <= token < vocab_size]:
        raise RequestError(f"logit_bias: got token id {bad[0]}, allowed: 0 to {vocab_size - 1}", "logit_bias")
    if bad_bias := [bias for bias in params.logit_bias.values() if math.isnan(bias) or bias == math.inf]:
        raise RequestError(f"logit_bias: got {bad_bias[0]}, allowed: a number or minus infinity", "logit_bias")
    if bad := [token for token in params.stop_token_ids if not 0 <= token < vocab_size]:
        raise RequestError(f"stop_token_ids: got {bad[0]}, allowed: 0 to {vocab_size - 1}", "stop_token_ids")
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_ids))
    if len(ends) > MAX_BANNED:
        raise RequestError(f"stop_token_ids: got {len(ends)} with the model's own, allowed: at most {MAX_BANNED}", "stop_token_ids")
    return tuple(sorted(ends))


def check_kind(prompt: Any) -> None:
    """Refuse what is no row of whole numbers: NumPy would cut 5.5 to 5, and fail on None with a message about itself."""
    if isinstance(prompt, str | bytes) or not (hasattr(prompt, "__len__") and hasattr(prompt, "__iter__")):
        raise RequestError(f"prompt: got {type(prompt).__name__}, allowed: a list of token ids", "prompt")
    for place, token in enumerate(prompt):
        try:
            operator.index(token)
        except TypeError:
            raise RequestError(f"prompt: got {token!r} at place {place}, allowed: token ids, which are whole numbers", "prompt") from None
