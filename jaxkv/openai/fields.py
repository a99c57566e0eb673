"""Which fields a body may have: the supported ones with their readers, those that are refused, those that change nothing.

Knows nothing of prompts or of how a value is used.
"""

from collections.abc import Mapping
from typing import Any

from jaxkv.errors import RequestError
from jaxkv.openai.constraints import bad_words
from jaxkv.openai.values import Reader, boolean, integer, logit_bias, number, shown, stop_strings, text, token_ids
from jaxkv.request import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_PRIORITY,
    MAX_REPETITION_PENALTY,
    MAX_TOP_LOGPROBS,
    MIN_PRIORITY,
    MIN_REPETITION_PENALTY,
)

MAX_STOPS = 16
MAX_STOP_LEN = 256  # characters; the end of an answer is compared with all of their beginnings at each token
MAX_SEED = 2**64 - 1
TIERS: Mapping[str, int] = {"priority": -10, "flex": 10}  # service_tier as a priority; any other tier asks for none

# Fields that would change the answer and cannot be honoured, with the values that ask for nothing; absent and null always do.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "stream": (False,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}

# Fields of the API that no answer depends on.
WITHOUT_EFFECT = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "store", "stream_options", "user"})


def readers(vocab_size: int) -> dict[str, Reader]:
    """Every supported field of both endpoints, except the prompt itself, with its reader."""
    return {
        "model": text,
        "max_tokens": integer(1),
        "max_completion_tokens": integer(1),
        "min_tokens": integer(0),
        "temperature": number(0, 2),
        "top_p": number(0, 1, above=True),
        "top_k": _top_k,
        "min_p": number(0, 1),
        "seed": integer(0, MAX_SEED),
        "stop": stop_strings(MAX_STOPS, MAX_STOP_LEN),
        "stop_token_ids": token_ids(vocab_size),
        "ignore_eos": boolean,
        "skip_special_tokens": boolean,
        "presence_penalty": number(-2, 2),
        "frequency_penalty": number(-2, 2),
        "repetition_penalty": number(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        "logit_bias": logit_bias(vocab_size, MAX_LOGIT_BIAS),
        "return_token_ids": boolean,
        "return_cached_tokens": boolean,
        "n": integer(1, MAX_CHOICES),
        "cache_prompt": boolean,
        "cache_salt": text,
        "priority": integer(MIN_PRIORITY, MAX_PRIORITY, "lower is served first"),
        "service_tier": text,
        "context_shift": boolean,
        "context_len": integer(1),
        "n_keep": integer(0),
        "n_discard": integer(1),
        "bad_words": bad_words,
    }


read_top_logprobs = integer(0, MAX_TOP_LOGPROBS)


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raise for the first field that would change the answer and cannot be honoured."""
    for field in sorted(UNSUPPORTED.keys() & body.keys()):
        value, allowed = body[field], UNSUPPORTED[field]
        if value is not None and not any(type(value) is type(fine) and value == fine for fine in allowed):
            fine = " or ".join(["leave it out", *(shown(value) for value in allowed)])
            raise RequestError(f"{field}: got {shown(value)}, which is not supported; {fine}", field)


def _top_k(field: str, value: Any) -> int:
    """More than any vocabulary has is all of it, as 0 and -1 are; a program's integer holds no larger one."""
    found: int = 0 if value == -1 and isinstance(value, int) else integer(0, note="0 or -1 is off")(field, value)
    return found if found < 2**31 else 0
