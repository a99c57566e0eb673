"""Real tokenizers, on the `tokenizers` package: read from a folder, or built from a vocabulary and its merges. Knows no model."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, pre_tokenizers, processors
from tokenizers import Tokenizer as Tokenizers
from tokenizers.models import BPE

from jaxkv.models.errors import ModelError
from jaxkv.models.tokenizer import TokenizerBase, check_text

# From so many characters on a text is a batch of one: the package lets other threads run beside a batch, but not beside a text alone. Eight
# megabytes in a request would stop all others for seconds.
LONG_TEXT = 4096

# How text is cut before merging, by the name GGUF files give it. A wrong one yields plausible but different ids, so others are refused.
PRE_TOKENIZERS: dict[str, list[Any]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: printable Latin-1 stands for itself, the other 68 for characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class HfTokenizer(TokenizerBase):
    """A byte-level or sentencepiece-style tokenizer with its special tokens and chat templates."""

    def __init__(
        self,
        tokenizer: Tokenizers,
        *,
        chat_templates: Mapping[str, str] | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        where: str = "tokenizer.json",
    ):
        decoder = str(tokenizer.decoder)
        self._byte_level = "ByteLevel" in decoder
        if not self._byte_level and "Metaspace" not in decoder and "ByteFallback" not in decoder:
            raise ModelError(f"{where}: its decoder {decoder[:80]} is not supported; supported are: ByteLevel, Metaspace, ByteFallback")
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        self._alphabet = _byte_alphabet()
        self._bytes: dict[int, bytes] = {}
        self.strips_first_space = not self._byte_level and ("Strip(" in decoder or "Metaspace" in decoder)
        self.chat_templates = dict(chat_templates or {})
        self.bos_token, self.eos_token = bos_token, eos_token

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; special tokens spelled out in the text become their single id."""
        check_text(text)
        if len(text) < LONG_TEXT:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def is_special(self, token_id: int) -> bool:
        return token_id in self._added and self._added[token_id].special

    def first_difference(self, other: "HfTokenizer") -> int | None:
        """The lowest id that is another token there, None where all are alike; special ones, which related models rename, apart."""
        ours, theirs = (
            {id_: token for token, id_ in each._tokenizer.get_vocab().items() if not each.is_special(id_)} for each in (self, other)
        )
        return min((id_ for id_ in ours.keys() & theirs.keys() if ours[id_] != theirs[id_]), default=None)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text; nothing for an id without a token."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._find_bytes(token_id)
        return self._bytes[token_id]

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id) or ""
        if token_id in self._added:
            return token.encode("utf-8")
        if self._byte_level:
            return bytes(self._alphabet[char] for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode("utf-8")

    def save(self, folder: Path) -> None:
        """Write the files that `read_tokenizer` reads."""
        folder.joinpath("tokenizer.json").write_text(self._tokenizer.to_str(), encoding="utf-8")
        folder.joinpath("tokenizer_config.json").write_text(json.dumps(self._settings(), indent=1), encoding="utf-8")

    def sha256(self) -> str:
        """Of all that decides which ids a text or a chat becomes; the same after `save` and `read_tokenizer`."""
        return hashlib.sha256(f"{self._tokenizer.to_str()}\n{json.dumps(self._settings())}".encode()).hexdigest()

    def _settings(self) -> dict[str, Any]:
        templates = [{"name": name, "template": template} for name, template in self.chat_templates.items()]
        return {"bos_token": self.bos_token, "eos_token": self.eos_token, "chat_template": templates}


def read_tokenizer(folder: Path) -> HfTokenizer | None:
    """The tokenizer of a folder with tokenizer.json, or None if there is none."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    try:
        tokenizer = Tokenizers.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        raise ModelError(f"{path} is not a tokenizer file: {error}") from error
    settings = _read_settings(folder)
    return HfTokenizer(
        tokenizer,
        chat_templates=_chat_templates(folder, settings),
        bos_token=_content(settings.get("bos_token")),
        eos_token=_content(settings.get("eos_token")),
        where=str(path),
    )


def bpe_tokenizer(
    *,
    tokens: Sequence[str],
    merges: Sequence[str],
    pre: str,
    special: set[str],
    added: set[str],
    bos: str | None,
    eos: str | None,
    add_bos: bool,
    chat_template: str | None,
    where: str,
) -> HfTokenizer:
    """A byte-level BPE tokenizer; `merges` are pairs "a b", best first."""
    if pre not in PRE_TOKENIZERS:
        raise ModelError(f"{where}: pre-tokenizer {pre!r} is not supported; supported are: {', '.join(sorted(PRE_TOKENIZERS))}")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizers(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[pre])
    tokenizer.decoder = decoders.ByteLevel()
    in_order = [token for token in tokens if token in special]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in in_order])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens if token in added])
    if add_bos and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, tokenizer.token_to_id(bos))])
    templates = {"default": chat_template} if chat_template else {}
    return HfTokenizer(tokenizer, chat_templates=templates, bos_token=bos, eos_token=eos, where=where)


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{path} cannot be read as a JSON object: {error}") from error


def _chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; a chat_template.jinja file wins over tokenizer_config.json."""
    found: Any = settings.get("chat_template") or []
    named = found if isinstance(found, list) else [{"name": "default", "template": found}]
    templates = {str(item["name"]): str(item["template"]) for item in named}
    file = folder / "chat_template.jinja"
    return templates | {"default": file.read_text(encoding="utf-8")} if file.exists() else templates


def _content(token: Any) -> str | None:
    """A special token's text, which may be wrapped in an object with its flags."""
    return token.get("content") if isinstance(token, dict) else token
