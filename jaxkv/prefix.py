"""Names for the content of prompt pages: equal keys mean equal tokens from the beginning on, computed by engines whose bytes agree.

A key is SHA-256 over the key of the page before and the page's own tokens; the first one starts from the system fingerprint and what keeps
callers apart. The page of the last prompt token has none, so that it is always computed: its logits are needed. A request that wants
logprobs of its prompt must compute all of it, so it shares with no other. Knows no pages, only how many tokens one holds.
"""

import hashlib
import json
from collections.abc import Sequence

import numpy as np

from jaxkv.request import SamplingParams


def page_keys(
    prompt: np.ndarray | Sequence[int], params: SamplingParams, group_id: int, *, page_size: int, fingerprint: str, is_cached: bool
) -> tuple[bytes, ...]:
    """One key per full page before the last prompt token; none where nobody could share one.

    Without the cache (`is_cached`) only the choices of one request share pages: `group_id` keeps all others out.
    """
    if not is_cached and params.n == 1:
        return ()
    scope = [fingerprint, params.cache_salt, None if is_cached else group_id]
    key, keys = hashlib.sha256(json.dumps(scope).encode()).digest(), list[bytes]()
    tokens = np.asarray(prompt, np.int32)
    for end in range(page_size, len(tokens), page_size):
        key = hashlib.sha256(key + tokens[end - page_size : end].tobytes()).digest()
        keys.append(key)
    return tuple(keys)
