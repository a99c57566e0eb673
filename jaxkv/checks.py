"""What a request may ask of the compiled programs. The wording of bodies is checked elsewhere; these limits hold for every caller."""

from collections.abc import Collection, Sequence

from jaxkv.errors import RequestError
from jaxkv.request import MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS, SamplingParams
from jaxkv.sampling import MAX_BANNED


def check_request(prompt: Sequence[int], params: SamplingParams, vocab_size: int, eos_ids: Collection[int]) -> tuple[int, ...]:
    """Raise RequestError for what the programs cannot take; return the ids that min_tokens keeps away."""
    if len(prompt) == 0:
        raise RequestError("prompt: got 0 tokens, allowed: at least 1", "prompt")
    if bad := [token for token in prompt if not 0 <= token < vocab_size]:
        raise RequestError(f"prompt: got token id {bad[0]}, allowed: 0 to {vocab_size - 1}", "prompt")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise RequestError(f"max_tokens: got {params.max_tokens}, allowed: at least 1", "max_tokens")
    if params.logprobs is not None and not 0 <= params.logprobs <= MAX_TOP_LOGPROBS:
        raise RequestError(f"logprobs: got {params.logprobs}, allowed: 0 to {MAX_TOP_LOGPROBS}", "logprobs")
    if params.temperature < 0:
        raise RequestError(f"temperature: got {params.temperature}, allowed: 0 or more", "temperature")
    if not 0 <= params.seed < 2**64:
        raise RequestError(f"seed: got {params.seed}, allowed: 0 to {2**64 - 1}", "seed")
    if len(params.logit_bias) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias: got {len(params.logit_bias)} entries, allowed: at most {MAX_LOGIT_BIAS}", "logit_bias")
    if bad := [token for token in params.logit_bias if not 0 <= token < vocab_size]:
        raise RequestError(f"logit_bias: got token id {bad[0]}, allowed: 0 to {vocab_size - 1}", "logit_bias")
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_ids))
    if len(ends) > MAX_BANNED:
        raise RequestError(f"stop_token_ids: got {len(ends)} with the model's own, allowed: at most {MAX_BANNED}", "stop_token_ids")
    return tuple(sorted(ends))
