"""How many sequences of all batches together may be with the engine at a time. Knows no batch and no engine."""

import asyncio
from collections import deque


class Window:
    """Lets in who asks, in the order of asking, so that batches side by side take turns. One that is larger than all of it goes alone."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_in = 0
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, num: int) -> None:
        """Wait until so many more are few enough."""
        if not self._line and self._fits(num):
            self.num_in += num
            return
        entry = num, asyncio.get_running_loop().create_future()
        self._line.append(entry)
        try:
            await entry[1]
        except asyncio.CancelledError:
            if entry in self._line:
                self._line.remove(entry)
                self._let_in()
            elif not entry[1].cancelled():  # let in, in the very moment in which it was told to stop
                self.leave(num)
            raise

    def leave(self, num: int) -> None:
        """So many have ended."""
        self.num_in -= num
        self._let_in()

    def _let_in(self) -> None:
        while self._line and (self._line[0][1].cancelled() or self._fits(self._line[0][0])):
            num, place = self._line.popleft()
            if not place.cancelled():
                self.num_in += num
                place.set_result(None)

    def _fits(self, num: int) -> bool:
        return not self.num_in or self.num_in + num <= self.size
