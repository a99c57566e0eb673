"""One look at the chats and the pool, as plain numbers and words: what the pictures are drawn from."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxkv.demo.chats import Chat
from jaxkv.engine import Engine
from jaxkv.live import Handle
from jaxkv.status import SequenceStatus

WORDS = {"prefilling": "prompt", "decoding": "running"}  # what a state is called here; the others keep their name
AWAY = ("parking", "parked", "restoring", "replaying")


@dataclass(frozen=True, slots=True)
class ChatRow:
    """One chat. `num_pages` are on the device, `image_pages` in host memory."""

    number: int
    title: str
    state: str  # waiting, prompt, running, parking, parked, restoring, replaying, done or failed
    num_generated: int
    max_tokens: int
    num_pages: int
    image_pages: int
    num_parks: int
    text: str


@dataclass(frozen=True, slots=True)
class Frame:
    """Everything that is shown at one moment. `owners` has a chat's number for every page of the pool, None for a free one."""

    rows: tuple[ChatRow, ...]
    owners: tuple[int | None, ...]
    page_size: int
    needed_pages: int
    num_parks: int
    num_restores: int
    host_bytes: int
    elapsed_s: float

    @property
    def num_tokens(self) -> int:
        """Generated so far, all chats together."""
        return sum(row.num_generated for row in self.rows)

    @property
    def num_done(self) -> int:
        """Chats that have their answer."""
        return sum(row.state == "done" for row in self.rows)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return sum(owner is None for owner in self.owners)

    @property
    def tokens_per_s(self) -> float:
        """Since the first request."""
        return self.num_tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0


def take_frame(engine: Engine, chats: Sequence[Chat], handles: Sequence[Handle], needed_pages: int, elapsed_s: float) -> Frame:
    """Look at a running engine between two steps."""
    status = engine.status()
    live = {sequence.seq_id: sequence for sequence in status.sequences}
    numbers = {handle.seq_id: chat.number for chat, handle in zip(chats, handles, strict=True)}
    owners = (None if owner is None else numbers.get(owner) for owner in engine.scheduler.page_owners())
    return Frame(
        rows=tuple(read_row(chat, handle, live.get(handle.seq_id)) for chat, handle in zip(chats, handles, strict=True)),
        owners=tuple(owners),
        page_size=engine.config.pool.page_size,
        needed_pages=needed_pages,
        num_parks=status.num_parks,
        num_restores=status.num_restores,
        host_bytes=status.host_bytes,
        elapsed_s=elapsed_s,
    )


def read_row(chat: Chat, handle: Handle, live: SequenceStatus | None) -> ChatRow:
    """One chat from its engine's view of it, or from its answer once it has one."""
    limit, made = chat.params.max_tokens or 0, len(handle.token_ids)
    if handle.completion is not None:
        end = handle.completion
        state = "done" if end.error is None else "failed"
        return ChatRow(chat.number, chat.title, state, made, limit, 0, 0, end.num_parks, end.text or ids_as_text(handle.token_ids))
    assert live is not None
    state, text = WORDS.get(live.state, live.state), live.text or ids_as_text(handle.token_ids)
    return ChatRow(chat.number, chat.title, state, made, limit, live.num_pages, live.image_pages, live.num_parks, text)


def ids_as_text(token_ids: Sequence[int]) -> str:
    """What there is to show of an answer without a tokenizer."""
    return " ".join(map(str, token_ids))
