"""Who a part of a step is for, so that what raises there is counted against them alone. Knows no engine."""

from collections.abc import Iterator
from contextlib import contextmanager

from jaxkv.guard import RecompileError


class Fault(Exception):
    """A step broke off while it computed for these sequences; the cause is what raised."""

    def __init__(self, seq_ids: tuple[int, ...]) -> None:
        super().__init__(f"sequences {seq_ids}")
        self.seq_ids = seq_ids


@contextmanager
def blaming(*seq_ids: int) -> Iterator[None]:
    """What raises in here has to do with these sequences and no others."""
    try:
        yield
    except (Fault, RecompileError):
        raise
    except Exception as error:
        raise Fault(seq_ids) from error
