"""Calls as answers tell them: in a whole message, or as the deltas of a stream. Knows neither how they are found nor who reads them."""

import hashlib
from collections.abc import Sequence
from typing import Any

from jaxkv.openai.tool_calls import Begin, CallParser, Content, Part
from jaxkv.openai.tools import ToolUse


class ChoiceCalls:
    """The calls in one choice of an answer.

    Their ids depend on prompt, seed and place alone: 24 hex digits of SHA-256 over `<seed>:<choice>:<call>:<prompt ids, with commas>`. So
    the same request has the same ids whenever it is answered, and no two calls of a conversation share one, since its prompt grows.
    """

    def __init__(self, use: ToolUse, prompt: Sequence[int], seed: int, choice: int) -> None:
        self._parser = CallParser(use.names, is_parallel=use.is_parallel, is_guided=use.is_guided)
        self._place, self._prompt = f"{seed}:{choice}", ",".join(map(str, prompt))

    def message(self, text: str) -> dict[str, Any]:
        """Content and calls of a whole answer; content is null where there are only calls."""
        content, calls = "", list[dict[str, Any]]()
        for part in self._parser.feed(text) + self._parser.finish():
            if isinstance(part, Content):
                content += part.text
            elif isinstance(part, Begin):
                calls.append(self._begin(part))
            else:
                calls[part.index]["function"]["arguments"] += part.text
        return {"content": content or None, "tool_calls": calls} if calls else {"content": content}

    def deltas(self, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        """What a stream says of a piece of text."""
        parts = self._parser.feed(text) + (self._parser.finish() if is_last else [])
        return [self._delta(part) for part in parts]

    def finish_reason(self, reason: str) -> str:
        """An answer that stopped by itself and has calls ends because of them."""
        return "tool_calls" if reason == "stop" and self._parser.num_calls else reason

    def _delta(self, part: Part) -> dict[str, Any]:
        if isinstance(part, Content):
            return {"content": part.text}
        if isinstance(part, Begin):
            return {"tool_calls": [{"index": part.index, **self._begin(part)}]}
        return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}

    def _begin(self, part: Begin) -> dict[str, Any]:
        digest = hashlib.sha256(f"{self._place}:{part.index}:{self._prompt}".encode()).hexdigest()
        return {"id": f"call_{digest[:24]}", "type": "function", "function": {"name": part.name, "arguments": ""}}
