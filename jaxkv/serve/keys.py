"""API keys: read once at the start, compared in constant time, never shown. Knows no request."""

import hashlib
import hmac
import os
from collections.abc import Iterable
from pathlib import Path

from jaxkv.errors import ConfigError

API_KEYS, OPERATOR_KEYS = "JAXKV_API_KEYS", "JAXKV_OPERATOR_KEYS"


class Keys:
    """A set of keys, of which only digests are kept."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in dict.fromkeys(keys)]

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._digests)

    def accept(self, key: str | None) -> bool:
        """Whether it is one of them; takes as long whichever it is, and however much of it is right."""
        digest = _digest(key or "")
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(found) and key is not None


def read_keys(file: str | None, variable: str, field: str) -> Keys:
    """The keys in a file, one a line (`#` begins a comment), and those in an environment variable, with commas between."""
    lines = [] if file is None else _lines(file, field)
    return Keys([*lines, *(key.strip() for key in os.environ.get(variable, "").split(",") if key.strip())])


def bearer(authorization: str | None) -> str | None:
    """The key in a header `Authorization: Bearer KEY`."""
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def _lines(file: str, field: str) -> list[str]:
    try:
        lines = [line.strip() for line in Path(file).expanduser().read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{field}: {file} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8'}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{field}: {file} holds no key; write one a line, or set {field} to null")
    return keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
