"""Notices that a client has left, in whatever state its request is. Knows no request."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

Result = TypeVar("Result")
GONE = 499  # the status of an answer that nobody reads
INSIST_S = 0.1  # a task that passed over being cancelled is told again
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ClientLeft(Exception):
    """Nobody is there any more to be answered."""


async def unless_left(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` returns or raises; ClientLeft, with `work` cancelled, if the client leaves first. The body must have been read."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        for task in (working, leaving):
            await _settle(task)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _settle(task: "asyncio.Future[Any]") -> None:
    """End a task; what it raises while it ends has been told already, or interests nobody."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=INSIST_S)
    if not task.cancelled():
        task.exception()
