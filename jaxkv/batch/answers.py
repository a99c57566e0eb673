"""Writes a line for each request of a job that has ended, and counts it. Knows nothing of who ran it, or of earlier runs."""

import time
from collections.abc import Sequence
from typing import Any

from jaxkv.batch.lines import Request
from jaxkv.batch.read import RawLine
from jaxkv.batch.records import Record, answer_line, error_line, short_id, token_digest
from jaxkv.batch.summary import Tally
from jaxkv.batch.write import OutputFile
from jaxkv.errors import JaxkvError
from jaxkv.openai import Endpoint, Frame, ParsedBody, build_answer
from jaxkv.openai.prompts import Tokenizer
from jaxkv.request import Completion


class AnswerWriter:
    """`model` is what answers call it; `answers` and `errors` may be the same file."""

    def __init__(
        self, answers: OutputFile, errors: OutputFile, tally: Tally, model: str, fingerprint: str, tokenizer: Tokenizer | None
    ) -> None:
        self._answers, self._errors, self._tally = answers, errors, tally
        self._model, self._fingerprint, self._tokenizer = model, fingerprint, tokenizer

    def answer(
        self, line: RawLine, request: Request, body: ParsedBody, completions: Sequence[Completion], truncates_at: int | None
    ) -> None:
        """One that has its answer: the choices of its first prompt, those of the second, and so on."""
        custom_id, ordinal = request.custom_id, line.ordinal
        kind = "chatcmpl" if body.endpoint is Endpoint.CHAT else "cmpl"
        frame = Frame(f"{kind}-{short_id(custom_id, ordinal)}", int(time.time()), self._model, self._fingerprint)
        answer: dict[str, Any] = build_answer(body, completions, frame, self._tokenizer, truncates_at)
        token_ids = [token_id for completion in completions for token_id in completion.token_ids]
        self._answers.append(answer_line(custom_id, ordinal, answer, [completion.token_ids for completion in completions]))
        usage = answer["usage"]
        self._tally.count(Record(custom_id, ordinal, None, token_digest(token_ids), usage["prompt_tokens"], usage["completion_tokens"]))
        for first in range(0, len(completions), body.params.n):
            self._tally.time(completions[first : first + body.params.n])

    def fail(self, line: RawLine, custom_id: str | None, code: str, error: JaxkvError | str) -> None:
        """One that has none, and why."""
        self._errors.append(error_line(custom_id, line.ordinal, line.where, code, error))
        self._tally.count(Record(custom_id, line.ordinal, code))
