"""Guesses by looking up: what followed the last few tokens when they stood in the prompt or the answer before. Knows no model."""

LONGEST = 3  # tokens that are looked up together, and if these never stood there before, fewer


class Lookup:
    """One sequence's tokens, and where each run of up to `LONGEST` of them was last followed by another: a fold over the tokens.

    tokens 7 8 9 1 7 8: behind 7 8 came 9, then 1, then 7; so these are the guesses. Behind the end they go on with themselves.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # a run -> the place of what followed it last

    @property
    def num_tokens(self) -> int:
        """Tokens taken so far."""
        return len(self._tokens)

    def take(self, tokens: list[int]) -> None:
        """The next tokens of the sequence."""
        for token in tokens:
            at = len(self._tokens)
            for length in range(1, min(LONGEST, at) + 1):
                self._next[tuple(self._tokens[at - length :])] = at
            self._tokens.append(token)

    def guess(self, num: int) -> list[int]:
        """The next `num` tokens; none where even the last one never stood there before."""
        for length in range(min(LONGEST, len(self._tokens)), 0, -1):
            place = self._next.get(tuple(self._tokens[-length:]))
            if place is not None:
                return self._copied(place, num)
        return []

    def _copied(self, place: int, num: int) -> list[int]:
        found = self._tokens[place : place + num]
        while len(found) < num:
            found.append(found[place + len(found) - len(self._tokens)])
        return found
