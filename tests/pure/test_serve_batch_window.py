"""The window that batches share: in the order of asking, never more than fit, and nothing is lost by whoever is told to stop."""

import asyncio

from jaxkv.serve.batch_window import Window


def run(work):
    return asyncio.run(work)


async def soon():
    for _ in range(5):
        await asyncio.sleep(0)


def test_whoever_asks_is_let_in_in_order_and_a_small_one_passes_no_larger_one():
    async def go():
        window, entered = Window(4), []

        async def enter(name, num):
            await window.enter(num)
            entered.append(name)

        tasks = [asyncio.create_task(enter(name, num)) for name, num in (("a", 3), ("b", 2), ("c", 1), ("d", 9), ("e", 1))]
        await soon()
        steps = [list(entered)]
        for num in (3, 3, 9):
            window.leave(num)
            await soon()
            steps.append(list(entered))
        await asyncio.gather(*tasks)
        return steps, window.num_in

    assert run(go()) == ([["a"], ["a", "b", "c"], ["a", "b", "c", "d"], ["a", "b", "c", "d", "e"]], 1)


def test_one_that_stops_waiting_holds_up_nobody_and_keeps_no_place():
    async def go():
        window = Window(2)
        await window.enter(2)
        large, small = asyncio.create_task(window.enter(2)), asyncio.create_task(window.enter(1))
        await soon()
        large.cancel()
        await soon()
        window.leave(1)
        await small
        late = asyncio.create_task(window.enter(1))
        await soon()
        window.leave(1)  # lets it in, and in the same moment it is told to stop
        late.cancel()
        await asyncio.gather(large, late, return_exceptions=True)
        return window.num_in, large.cancelled(), late.cancelled()

    assert run(go()) == (1, True, True)
