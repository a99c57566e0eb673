"""From what a request demands of the text to a guide for each of its sequences. The only file that knows llguidance, which runs grammars.

Knows nothing of the engine's inside.
"""

import functools
import json
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from jaxkv.bad_words import BadWords, Spellings
from jaxkv.constraint import BLANKS, Constraint, check_constraint
from jaxkv.errors import JaxkvError, RequestError
from jaxkv.extras import require_extra
from jaxkv.guide import Guide, one_line
from jaxkv.request import SamplingParams

_KEPT = 64  # compiled constraints, and as many lists of words


class Tokenizer(Protocol):
    """What is needed of a tokenizer here."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...

    def is_special(self, token_id: int, /) -> bool: ...


class Guides:
    """Compiles what requests demand, for one tokenizer, and makes their guides.

    `prepare` may run in another thread than `start`, so that nobody's tokens wait for a grammar; `start` then finds it ready.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Collection[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, frozenset(eos_ids)
        self._matcher: Callable[[Constraint], Any] = functools.lru_cache(_KEPT)(self._compile)
        self._words: Callable[[tuple[str, ...]], BadWords] = functools.lru_cache(_KEPT)(lambda words: BadWords(words, self._spellings))

    def prepare(self, params: SamplingParams) -> None:
        """Compile what `params` demand; RequestError for what cannot be had."""
        if params.constraint is not None:
            check_constraint(params.constraint)
            self._need_tokenizer(params.constraint.param)
            self._matcher(params.constraint)
        if params.bad_words:
            self._need_tokenizer("bad_words")
            self._words(params.bad_words)

    def start(self, params: SamplingParams, ends: Collection[int]) -> Guide | None:
        """A guide for one sequence, which `ends` end; None where it may say anything. RequestError where it could say nothing."""
        if params.constraint is None and not params.bad_words:
            return None
        self.prepare(params)
        matcher = None if params.constraint is None else self._matcher(params.constraint).deep_copy()
        words = self._words(params.bad_words) if params.bad_words else None
        guide = Guide(matcher, words, ends, params.min_tokens, self._vocab_size)
        if guide.is_stuck:
            param = "bad_words" if params.constraint is None else params.constraint.param
            raise RequestError(f"{param}: the answer could not even begin: {guide.reason}", param)
        return guide

    def _need_tokenizer(self, param: str) -> None:
        if self._tokenizer is None:
            raise RequestError(f"{param}: this model has no tokenizer, so nobody knows what its tokens say; leave it out", param)

    @functools.cached_property
    def _spellings(self) -> Spellings:
        """What tokens add to the text: special ones nothing."""
        assert self._tokenizer is not None
        tokenizer = self._tokenizer
        return Spellings([b"" if self._is_special(i) else tokenizer.token_bytes(i) for i in range(self._vocab_size)])

    def _is_special(self, token_id: int) -> bool:
        assert self._tokenizer is not None
        return token_id in self._eos_ids or self._tokenizer.is_special(token_id)

    @functools.cached_property
    def _language(self) -> Any:
        """llguidance's view of the tokenizer. One token more than there is stands for the end of the answer."""
        assert self._tokenizer is not None
        special = [token_id for token_id in range(self._vocab_size) if self._is_special(token_id)]
        return require_extra("structured", "llguidance").LLTokenizer(_Wrapped(self._tokenizer, self._spellings, special))

    def _compile(self, constraint: Constraint) -> Any:
        """The matcher at the beginning of an answer, to be copied and never advanced."""
        try:
            make = require_extra("structured", "llguidance").LLMatcher
        except JaxkvError as error:
            raise RequestError(f"{constraint.param}: {error}", constraint.param) from None
        try:
            matcher = make(self._language, grammar_of(constraint), log_level=0, limits=limits())
        except ValueError as error:  # half a surrogate pair, in the text or as an escape
            raise RequestError(f"{constraint.param}: {one_line(str(error))}", constraint.param) from None
        if not matcher.is_error():
            matcher.compute_bitmask()  # what the first token needs is then there for all copies
        if matcher.is_error():
            reason = "no text has this form" if "NoExtension" in matcher.get_error() else one_line(matcher.get_error())
            raise RequestError(f"{constraint.param}: {reason}", constraint.param)
        return matcher


def grammar_of(constraint: Constraint) -> str:
    """The constraint in llguidance's own terms."""
    matcher = require_extra("structured", "llguidance").LLMatcher
    if constraint.kind == "choice":
        return str(matcher.grammar_from_regex("|".join(map(_literal, json.loads(constraint.text)))))
    if constraint.kind == "regex":
        return str(matcher.grammar_from_regex(constraint.text))
    if constraint.kind == "grammar":
        return str(matcher.grammar_from_lark(constraint.text))
    schema = constraint.text if constraint.kind == "json_schema" else '{"type": "object"}'
    return str(matcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": BLANKS}))


def _literal(text: str) -> str:
    """A regular expression for just this text."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def limits() -> Any:
    """What a grammar may cost, to compile and at each token: llguidance's own limits, but room for objects of a few thousand keys."""
    return require_extra("structured", "llguidance").LLParserLimits(verbose_errors=False, max_items_in_row=10_000)


class _Wrapped:
    """A tokenizer in the shape that llguidance asks for."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, spellings: Spellings, special: Sequence[int]) -> None:
        self._tokenizer, self._texts = tokenizer, spellings.tokens
        self.eos_token_id = len(spellings.tokens)
        self.special_token_ids = [*special, self.eos_token_id]
        self.tokens = [*spellings.tokens, b"<the end of the answer>"]
        for token_id in special:
            self.tokens[token_id] = tokenizer.token_bytes(token_id)
        self._ids = {text: token_id for token_id, text in enumerate(self._texts) if text}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text: the tokenizer's own, unless it writes another space before them."""
        ids, wanted = self._tokenizer.encode(text, add_special_tokens=False), text.encode()
        return ids if b"".join(self._texts[i] for i in ids) == wanted else self._split(wanted)

    def _split(self, text: bytes) -> list[int]:
        """The longest token that fits, again and again; as far as there are tokens."""
        ids: list[int] = []
        while text:
            length = next((n for n in range(min(self._longest, len(text)), 0, -1) if text[:n] in self._ids), 0)
            if length == 0:
                break
            ids.append(self._ids[text[:length]])
            text = text[length:]
        return ids
