"""A step's samples, brought from the device to the host. Knows no sequence."""

import numpy as np

from jaxkv.request import TokenLogprobs
from jaxkv.sampling import Sampled
from jaxkv.scoring import Scores


class Samples:
    """Tokens at once; logprobs when the first sequence asks for them."""

    def __init__(self, sampled: Sampled) -> None:
        self._sampled = sampled
        self.token = np.asarray(sampled.token)
        self._rest: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def logprobs(self, row: int, wanted: int | None) -> TokenLogprobs | None:
        """The chosen token's logprob and the `wanted` best; None when nobody asked."""
        if wanted is None:
            return None
        if self._rest is None:
            s = self._sampled
            self._rest = (np.asarray(s.logprob), np.asarray(s.top_ids), np.asarray(s.top_logprobs))
        chosen, ids, values = self._rest
        top = tuple((int(i), float(x)) for i, x in zip(ids[row, :wanted], values[row, :wanted], strict=True))
        return TokenLogprobs(int(self.token[row]), float(chosen[row]), top)


def read_scores(scores: Scores, tokens: np.ndarray, wanted: int) -> list[TokenLogprobs]:
    """The logprobs of the `tokens` of a prompt that stand behind the chunk's first ones, with the `wanted` best in the place of each."""
    chosen, ids, values = np.asarray(scores.logprob), np.asarray(scores.top_ids), np.asarray(scores.top_logprobs)
    top = [tuple(zip(ids[i, :wanted].tolist(), values[i, :wanted].tolist(), strict=True)) for i in range(len(tokens))]
    return [TokenLogprobs(int(token), float(chosen[i]), top[i]) for i, token in enumerate(tokens)]
