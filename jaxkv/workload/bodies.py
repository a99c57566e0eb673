"""Requests of a workload as bodies of OpenAI's API: the same for the engine, a batch file, a server and other engines. Sends none.

Prompts that are generated are token ids, drawn from the seed and the request's number; those that come from files are texts.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxkv.config import Config
from jaxkv.workload.draw import draw
from jaxkv.workload.trace import Request

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MAX_SPECIAL = 1000  # ids below, or a sixteenth of a smaller vocabulary, may be special: none of them is drawn


@dataclass(frozen=True, slots=True)
class Call:
    """One request as it is asked: its name, the endpoint and the body."""

    custom_id: str
    url: str
    body: dict[str, Any]
    request: Request

    def to_line(self) -> str:
        """As a line of a batch file."""
        return json.dumps({"custom_id": self.custom_id, "method": "POST", "url": self.url, "body": self.body}, ensure_ascii=False) + "\n"


def make_calls(config: Config, vocab_size: int, seed: int = 0) -> list[Call]:
    """The whole load in order of arrival; `seed` is added to workload.seed. Ids of prompts are below `vocab_size`.

    An answer goes on for its drawn length whatever the model would say, unless the configuration sets request.ignore_eos to false.
    """
    seed += config.workload.seed
    requests = draw(config.workload, seed)
    shared = _ids(f"prefix {seed}", config.workload.shared_prefix_len, vocab_size)
    return [_call(config, request, i, seed, vocab_size, shared) for i, request in enumerate(requests)]


def _call(config: Config, request: Request, i: int, seed: int, vocab_size: int, shared: Sequence[int]) -> Call:
    body: dict[str, Any] = {"max_tokens": request.max_tokens}
    if config.request.ignore_eos is not False:
        body["ignore_eos"] = True
    if config.request.seed is None:
        body["seed"] = random.Random(f"seed {seed} {i}").getrandbits(32)
    if request.n > 1:
        body["n"] = request.n
    if request.priority:
        body["priority"] = request.priority
    url = COMPLETIONS
    if request.text is None:
        own = _ids(f"prompt {seed} {i}", request.prompt_len, vocab_size)
        body = {"prompt": [*shared[: request.shared_len], *own[request.shared_len :]], **body}
    elif config.workload.chat:
        url, body = CHATS, {"messages": [{"role": "user", "content": request.text}], **body}
    else:
        body = {"prompt": request.text, **body}
    return Call(f"request-{i:06d}", url, body, request)


def _ids(name: str, num: int, vocab_size: int) -> list[int]:
    """Token ids that depend on the name alone; the same beginning whatever the number."""
    stream, first = random.Random(name), min(MAX_SPECIAL, vocab_size // 16)
    return [stream.randrange(first, vocab_size) for _ in range(num)]
