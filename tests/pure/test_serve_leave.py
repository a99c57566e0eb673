"""A client that leaves is noticed, whatever the work for it does about being cancelled."""

import asyncio

import pytest

from jaxkv.serve.leave import ClientLeft, unless_left
from jaxkv.serve.sse import EventStream

GONE = {"type": "http.disconnect"}


async def left() -> dict[str, str]:
    return GONE


def in_time(work):
    async def limited():
        async with asyncio.timeout(5):
            return await work

    return asyncio.run(limited())


def test_work_that_passes_over_being_cancelled_once_is_cancelled_again():
    heard = []

    async def stubborn() -> None:
        while len(heard) < 3:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                heard.append("cancelled")

    with pytest.raises(ClientLeft):
        in_time(unless_left(left, stubborn()))
    assert heard == ["cancelled"] * 3


def test_a_stream_ends_when_its_client_leaves_in_the_very_moment_in_which_a_piece_is_sent():
    sent, closed = [], []

    async def go():
        leaving, sending = asyncio.Event(), asyncio.Event()

        async def receive():
            await leaving.wait()
            return GONE

        async def send(message):
            sent.append(message["type"])
            if len(sent) == 2:  # both tasks are ready to go on in the same turn of the loop
                leaving.set()
                asyncio.get_running_loop().call_soon(sending.set)
                await sending.wait()

        async def pieces():
            for _ in range(2):
                yield b"piece"
            await asyncio.sleep(60)

        await EventStream(pieces(), lambda: closed.append(True))({"type": "http"}, receive, send)

    in_time(go())
    assert closed == [True] and len(sent) <= 4


def test_what_work_raises_while_it_is_ended_is_nobodys():
    async def sore() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise OSError("too late")

    with pytest.raises(ClientLeft):
        in_time(unless_left(left, sore()))
