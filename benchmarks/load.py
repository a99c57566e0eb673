"""The load of a configuration against a running server: this one, or any other with OpenAI's endpoints.

    python benchmarks/load.py CONFIG --url http://127.0.0.1:8000 [--model NAME] [--vocab-size N] [--section.field V]

What to expect. The requests are those that `jaxkv simulate`, `sweep` and `workload` take from the same configuration, with the same
prompts, seeds and lengths, at the same times; so two servers, or a server and a simulation, can be compared. A server cannot answer
sooner than its longest answer takes, nor before the last request came: `last_arrival_s` is that floor. Each client is a thread that reads
its stream; one that leaves (`workload.cancels`) closes its connection. The last line is one of JSON.
"""

import argparse
import http.client
import json
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from figures import machine, say

from jaxkv.config import load_config, split_overrides
from jaxkv.errors import ConfigError, JaxkvError
from jaxkv.models.errors import ModelError
from jaxkv.stats import spread
from jaxkv.workload.bodies import Call, make_calls

TIMEOUT_S = 3600.0


@dataclass(slots=True)
class Stream:
    """What one client saw. Seconds count from the beginning of the run."""

    call: Call
    began: float  # when it was to begin
    sent_s: float = 0.0
    ended: str = "failed"
    error: str = ""
    num_tokens: int = 0
    times: list[float] = field(default_factory=list)  # of each piece
    pieces: dict[int, int] = field(default_factory=dict)  # by choice

    def run(self, url: str, model: str | None, key: str | None) -> None:
        """Wait for its time, ask, read to the end or until it leaves."""
        time.sleep(max(0.0, self.began + self.call.request.arrival_s - time.perf_counter()))
        self.sent_s = time.perf_counter() - self.began
        try:
            self._ask(url, model, key)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.error = f"{type(error).__name__}: {error}"

    def _ask(self, url: str, model: str | None, key: str | None) -> None:
        parts = urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
        body = {**self.call.body, **({"model": model} if model else {}), "stream": True, "stream_options": {"include_usage": True}}
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        connection.request("POST", parts.path.rstrip("/") + self.call.url, json.dumps(body), headers)
        with connection.getresponse() as answer:
            if answer.status != 200:
                self.ended, self.error = "refused", f"{answer.status} {answer.read(400).decode(errors='replace')}"
            else:
                self._read(answer)
        connection.close()

    def _read(self, answer: http.client.HTTPResponse) -> None:
        for raw in answer:
            line = raw.decode()
            if line.startswith("data: [DONE]"):
                self.ended = "finished"
                return
            if line.startswith("data: "):
                self._take(json.loads(line.removeprefix("data: ")))
            if self._leaves():
                self.ended, self.num_tokens = "cancelled", sum(self.pieces.values())
                return

    def _take(self, body: dict[str, Any]) -> None:
        if error := body.get("error"):
            raise ValueError(str(error))
        for choice in body.get("choices", []):
            if choice.get("text") or (choice.get("delta") or {}).get("content"):
                self.times.append(time.perf_counter() - self.began)
                self.pieces[choice["index"]] = self.pieces.get(choice["index"], 0) + 1
        if usage := body.get("usage"):
            self.num_tokens = usage["completion_tokens"]

    def _leaves(self) -> bool:
        """Whether each choice has come as far as its caller wants; a piece is taken for a token."""
        request = self.call.request
        return request.is_cancelled and len(self.pieces) == request.n and min(self.pieces.values()) >= request.ends_after


def main() -> None:
    """Read the command line, send everything, print the figures."""
    overrides, rest = split_overrides(sys.argv[1:])
    parser = argparse.ArgumentParser(prog="load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="a configuration; any field can be set with --section.field VALUE")
    parser.add_argument("--url", required=True, help="where the server is, such as http://127.0.0.1:8000")
    parser.add_argument("--model", help="what the server calls its model, where it asks for it")
    parser.add_argument("--vocab-size", type=int, help="ids of generated prompts are below; default: the configured model's own")
    words = parser.parse_args(rest)
    config = load_config(words.config, overrides)
    if urlsplit(words.url).scheme not in ("http", "https") or not urlsplit(words.url).hostname:
        raise ConfigError(f"--url: got {words.url!r}, allowed: http://HOST:PORT or https://HOST")
    calls = make_calls(config, words.vocab_size or _vocab_size(config))
    say((__doc__ or "").strip() + "\n")
    streams = run(calls, words.url, words.model)
    print(
        json.dumps(
            {"benchmark": "load", "url": words.url, "hardware": machine(), "workload": config.workload.model_dump(), **figures(streams)}
        )
    )


def run(calls: list[Call], url: str, model: str | None = None) -> list[Stream]:
    """All clients, each at its time."""
    began, key = time.perf_counter(), os.environ.get("JAXKV_API_KEYS", "").partition(",")[0] or None
    streams = [Stream(call, began) for call in calls]
    threads = [threading.Thread(target=stream.run, args=(url, model, key), daemon=True) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return streams


def figures(streams: list[Stream]) -> dict[str, Any]:
    """The numbers of a run: times from when a request was sent, the makespan from the first arrival to the last piece."""
    ended = [stream for stream in streams if stream.times]
    makespan = max((stream.times[-1] for stream in ended), default=0.0) - min((stream.sent_s for stream in ended), default=0.0)
    gaps = [b - a for stream in ended if stream.call.request.n == 1 for a, b in zip(stream.times, stream.times[1:], strict=False)]
    num_tokens = sum(stream.num_tokens for stream in streams)
    errors = sorted({stream.error for stream in streams if stream.error})
    return {
        "requests": len(streams),
        **{name: sum(stream.ended == name for stream in streams) for name in ("finished", "cancelled", "failed", "refused")},
        "errors": errors[:5],
        "last_arrival_s": round(max((stream.call.request.arrival_s for stream in streams), default=0.0), 3),
        "makespan_s": round(makespan, 3),
        "generated_tokens": num_tokens,
        "tokens_per_s": round(num_tokens / makespan, 3) if makespan else 0.0,
        "ttft_s": spread((stream.times[0] - stream.sent_s for stream in ended), 1.0, p50=0.5, p99=0.99, max=1.0),
        "completion_s": spread((stream.times[-1] - stream.sent_s for stream in ended), 1.0, p50=0.5, p99=0.99, max=1.0),
        "gap_ms": spread(gaps, 1e3, p50=0.5, p99=0.99, max=1.0),
    }


def _vocab_size(config: Any) -> int:
    from jaxkv.sizing import read_shape

    return read_shape(config, None).vocab_size


if __name__ == "__main__":
    try:
        main()
    except (JaxkvError, ModelError) as error:
        print(f"load: error: {error}", file=sys.stderr)
        sys.exit(2)
