"""Text to token ids and back: the protocol, the incremental decoder, and a tokenizer of bytes for tests. Knows no file format."""

import codecs
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from jaxkv.models import chat
from jaxkv.models.errors import ModelError


@runtime_checkable
class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def is_special(self, token_id: int) -> bool: ...
    def sha256(self) -> str: ...
    def stream(self, skip_special_tokens: bool = True) -> "TextStream": ...
    @property
    def knows_tools(self) -> bool: ...
    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, tools: Any = None, **kwargs: Any
    ) -> str: ...


def check_text(text: str) -> None:
    """Refuse a string that cannot be written as UTF-8; JSON can smuggle one in."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ModelError(f"the text holds half a surrogate pair at character {error.start}, which is no valid text") from error


class TextStream:
    """Token ids to text, one at a time; the pieces joined are what `decode` gives for all of them."""

    def __init__(self, tokenizer: "TokenizerBase", skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = True

    def step(self, token_id: int) -> str:
        """The characters this token completes: none while a character is only begun."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        raw = self._tokenizer.token_bytes(token_id)
        if self._at_start and raw and self._tokenizer.strips_first_space:
            raw = raw.removeprefix(b" ")
        self._at_start = self._at_start and not raw
        return self._utf8.decode(raw)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never was completed."""
        return self._utf8.decode(b"", final=True)


class TokenizerBase:
    """What all tokenizers share, given `token_bytes` and `is_special`."""

    strips_first_space = False  # sentencepiece models put a space before the first word
    bos_token: str | None = None
    eos_token: str | None = None
    chat_templates: Mapping[str, str] = MappingProxyType({})  # "default", and "tool_use" where a model has one for tools

    def token_bytes(self, token_id: int) -> bytes:
        raise NotImplementedError

    def is_special(self, token_id: int) -> bool:
        raise NotImplementedError

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        stream = self.stream(skip_special_tokens)
        return "".join([stream.step(token_id) for token_id in ids]) + stream.flush()

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        return TextStream(self, skip_special_tokens)

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template has a place for tools, and so for calls and results."""
        return "tool_use" in self.chat_templates or chat.reads(self.chat_templates.get("default", ""), "tools")

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, tools: Any = None, **kwargs: Any
    ) -> str:
        """The prompt text of a conversation, special tokens spelled out; encode it without adding special tokens."""
        template = self.chat_templates.get("tool_use" if tools else "default", self.chat_templates.get("default"))
        if template is None:
            raise ModelError("this model has no chat template; use /v1/completions with a prompt, or add chat_template.jinja to its folder")
        tokens = {"bos_token": self.bos_token or "", "eos_token": self.eos_token or ""}
        return chat.render(template, messages, **{**tokens, "tools": tools, "add_generation_prompt": add_generation_prompt, **kwargs})


BYTE_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ByteTokenizer(TokenizerBase):
    """A test double: ids 0 to 255 are bytes, those after them the special tokens; "a" is 97, "é" is [195, 169]."""

    chat_templates: Mapping[str, str] = MappingProxyType({"default": BYTE_CHAT})

    def __init__(self, special: Sequence[str] = ("<|im_start|>", "<|im_end|>")):
        self._special = {token: 256 + i for i, token in enumerate(special)}
        self._split = re.compile("(" + "|".join(map(re.escape, special)) + ")" if special else "(?!)")

    @property
    def vocab_size(self) -> int:
        return 256 + len(self._special)

    def sha256(self) -> str:
        """The identity of this tokenizer: its special tokens are all that can differ."""
        return hashlib.sha256("\n".join(self._special).encode()).hexdigest()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        check_text(text)
        for part in self._split.split(text):
            ids.extend([self._special[part]] if part in self._special else part.encode("utf-8"))
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return next((token.encode() for token, i in self._special.items() if i == token_id), b"")

    def is_special(self, token_id: int) -> bool:
        return 256 <= token_id < self.vocab_size
