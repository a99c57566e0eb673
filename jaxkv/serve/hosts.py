"""Which names the server may be called by. Knows no route.

A web page elsewhere can have its own name point at this machine (DNS rebinding), and is then of the same origin as a server here. But it
calls the server by that name. So a server for this machine alone that asks for no key answers to addresses, localhost and names it knows.
"""

from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

LOOPBACK = ("127.", "::1", "localhost")


class Hosts:
    """The names a server answers to; None is any."""

    def __init__(self, allowed: Iterable[str] | None) -> None:
        self._allowed = None if allowed is None else frozenset(name.lower() for name in allowed)

    def accept(self, host: str) -> bool:
        """Whether a `Host` header names it; no header comes from no browser."""
        if self._allowed is None or not host:
            return True
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name == "localhost" or name.endswith(".localhost") or name in self._allowed or _is_address(name)


def hosts_for(listens_on: str, allowed: Iterable[str], *, has_keys: bool) -> Hosts:
    """Any, where a key is asked for or other machines are let in anyway, unless names are given."""
    names = tuple(allowed)
    return Hosts(names if names or (listens_on.startswith(LOOPBACK) and not has_keys) else None)


def _is_address(name: str) -> bool:
    try:
        ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
