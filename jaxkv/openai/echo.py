"""A prompt given back before its answer (`echo`), with the logprobs of its own tokens. Knows no endpoint and no stream."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxkv.openai.body import ParsedBody
from jaxkv.openai.logprobs import finite, token_text, top_of
from jaxkv.openai.prompts import Tokenizer
from jaxkv.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as it is given back: its text as it came, or that of its token ids with special tokens spelled out."""

    token_ids: list[int]
    text: str
    offsets: list[int]  # characters of the text before each token

    def logprobs(self, entries: Sequence[TokenLogprobs | None], tokenizer: Tokenizer | None, count: int) -> dict[str, Any]:
        """The parallel lists of a completion, for the prompt; its first token follows nothing, so it has null."""
        return {
            "tokens": [token_text(token_id, tokenizer) for token_id in self.token_ids],
            "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry is None else top_of(entry, tokenizer) for entry in entries] if count else None,
            "text_offset": self.offsets,
        }


def echo_of(body: ParsedBody, index: int, tokenizer: Tokenizer | None) -> Echo | None:
    """The prompt of choice `index`, where prompts are given back."""
    if not body.texts:
        return None
    prompt = index // body.params.n
    return make_echo(body.prompts[prompt], body.texts[prompt], tokenizer)


def make_echo(token_ids: list[int], given: str | None, tokenizer: Tokenizer | None) -> Echo:
    """`given`: the text that the token ids were made of. A special token that is not in it, which the tokenizer put there, has no room."""
    if tokenizer is None:
        return Echo(token_ids, "", [0] * len(token_ids))
    stream, text, offsets = tokenizer.stream(False), "", list[int]()
    for token_id in token_ids:
        offsets.append(len(text))
        piece = stream.step(token_id)
        if given is None or not tokenizer.is_special(token_id) or given.startswith(piece, len(text)):
            text += piece
    if given is None:
        return Echo(token_ids, text + stream.flush(), offsets)
    return Echo(token_ids, given, [min(offset, len(given)) for offset in offsets])


def join_logprobs(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Parallel lists, one behind the other."""
    return {name: None if found is None else [*found, *after[name]] for name, found in before.items()}
