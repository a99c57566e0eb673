"""The eight chats, what they need of a pool, and the pool they get. Knows no engine."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxkv.config import Config
from jaxkv.models import ModelError
from jaxkv.request import SamplingParams
from jaxkv.scheduler.need import need, pages_for


@dataclass(frozen=True, slots=True)
class Question:
    """What somebody asks; the answer ends after `max_tokens` at the latest. Another seed gives another answer, the same one every time."""

    title: str
    text: str
    max_tokens: int
    seed: int


QUESTIONS = (
    Question("Poem", "Write a poem of three verses about a lighthouse in winter.", 160, 1),
    Question("Pancakes", "How do I make banana pancakes for two people? List what I need, then the steps.", 210, 2),
    Question("Blue sky", "Why is the sky blue at noon and red in the evening? Explain it to a curious ten-year-old.", 200, 3),
    Question(
        "Summary",
        "Summarize this in a few sentences: The library of Alexandria was one of the largest libraries of the ancient world. It was part "
        "of a research institute called the Mouseion, which was dedicated to the nine Muses. Scholars from all around the Mediterranean "
        "lived and worked there, were paid by the king, and wrote about mathematics, medicine, poetry and the stars. Ships that came to "
        "the harbour had to hand over their books to be copied. The library did not vanish in one great fire, as is often told, but "
        "declined over centuries.",
        150,
        4,
    ),
    Question(
        "Trumpet",
        "Write a short, polite letter to my neighbour Mr. Bell. He plays the trumpet every night after eleven, and I cannot sleep.",
        200,
        5,
    ),
    Question("Python", "Write a Python function that checks whether a word is a palindrome, and explain how it works.", 220, 5),
    Question("Lisbon", "Plan a weekend in Lisbon for someone who likes music, old tiles and long walks.", 220, 3),
    Question("Robot", "Tell a short story about an old robot in a garden who finds a seed that nobody knows.", 220, 8),
)


@dataclass(frozen=True, slots=True)
class Chat:
    """One of the eight, ready to submit."""

    number: int  # 1 to 8
    title: str
    question: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams

    def num_pages(self, page_size: int) -> int:
        """Pages it holds at its longest."""
        assert self.params.max_tokens is not None
        return pages_for(need(len(self.prompt_ids), self.params.max_tokens), page_size)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Pages: what the eight need together, and what the crowded and the ample pool have."""

    page_size: int
    needed: int
    crowded: int
    note: str | None = None

    @property
    def crowded_tokens(self) -> int:
        """Usable tokens of the pool that is too small."""
        return self.crowded * self.page_size

    @property
    def needed_tokens(self) -> int:
        """Usable tokens of a pool where nobody ever waits."""
        return self.needed * self.page_size


def make_chats(tokenizer: Any | None, vocab_size: int, max_len: int) -> list[Chat]:
    """The eight questions as this model reads them; random token ids for one without a tokenizer. All fit into `max_len` tokens."""
    chats = []
    for number, question in enumerate(QUESTIONS, start=1):
        ids = random_ids(number, vocab_size) if tokenizer is None else prompt_ids(tokenizer, question.text)
        ids = ids[: max(1, max_len // 2)]
        text = question.text if tokenizer is not None else f"{len(ids)} random token ids"
        room = max_len - len(ids) + 1
        params = SamplingParams(max_tokens=min(question.max_tokens, room), temperature=0.7, top_p=0.9, seed=question.seed, logprobs=0)
        chats.append(Chat(number, question.title, text, tuple(ids), params))
    return chats


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """A question as the chat template puts it, or as it is where a model has no template."""
    try:
        rendered = tokenizer.render_chat([{"role": "user", "content": text}])
    except ModelError:
        return list(tokenizer.encode(text, add_special_tokens=True))
    return list(tokenizer.encode(rendered, add_special_tokens=False))


def random_ids(number: int, vocab_size: int) -> list[int]:
    """Between 16 and 96 token ids, the same ones every time."""
    draw = random.Random(number)
    return [draw.randrange(vocab_size) for _ in range(draw.randint(16, 96))]


def choose_sizes(chats: Sequence[Chat], config: Config) -> Sizes:
    """The configured pool if it is a tight one for these chats: it holds the largest, and at most half of all. Else a third of all."""
    page_size = config.pool.page_size
    pages = [chat.num_pages(page_size) for chat in chats]
    needed, least = sum(pages), max(*pages, pages_for(config.scheduler.prefill_chunk, page_size))
    asked = None if config.pool.tokens is None else config.pool.tokens // page_size
    if asked is not None and least <= asked <= needed // 2:
        return Sizes(page_size, needed, asked)
    crowded = max(least, round(needed / 3))
    note = None
    if config.pool.tokens is not None:
        note = (
            f"pool.tokens is {config.pool.tokens}; for these chats the demo takes {crowded * page_size}, "
            f"about a third of the {needed * page_size} they need"
        )
    return Sizes(page_size, needed, crowded, note)


def with_pool(config: Config, tokens: int, *, is_plain: bool = False) -> Config:
    """The configuration with another pool; `is_plain` drops the debug section too, so that nothing parks but for want of room."""
    changes: dict[str, Any] = {"pool": config.pool.model_copy(update={"tokens": tokens})}
    if is_plain:
        changes["debug"] = type(config.debug)()
    return config.model_copy(update=changes)
