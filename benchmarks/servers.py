"""Servers of ours in processes of their own, and what a client sees of one stream. Knows no load and no benchmark."""

import http.client
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxkv.errors import JaxkvError

READY = re.compile(r"http://127\.0\.0\.1:(\d+)")
START_S = 300.0
TIMEOUT_S = 600.0


@contextmanager
def server(path: Path, fields: Mapping[str, Any]) -> Iterator[int]:
    """The port of a server over a configuration with other fields, once it serves; it is asked to stop at the end."""
    words = [f"--{name}={value}" for name, value in {**fields, "server.port": 0, "server.page": "false"}.items()]
    command = [sys.executable, "-m", "jaxkv", "serve", str(path), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: list[str] = []
    port: list[int] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if not port and (match := READY.search(line)):
                port.append(int(match[1]))

    threading.Thread(target=read, daemon=True).start()
    try:
        deadline = time.monotonic() + START_S
        while not (port and _is_healthy(port[0])):
            if process.poll() is not None or time.monotonic() > deadline:
                raise JaxkvError(f"a server did not start: {(lines or ['it said nothing'])[-1].strip()}")
            time.sleep(0.2)
        yield port[0]
    finally:
        process.terminate()
        process.wait()


def figures(port: int) -> dict[str, float]:
    """Everything of /metrics by name and labels, without the prefix."""
    told = [line.rpartition(" ") for line in _get(port, "/metrics")[1].splitlines() if line.startswith("jaxkv_")]
    return {name.removeprefix("jaxkv_"): float(value) for name, _, value in told}


def _is_healthy(port: int) -> bool:
    try:
        return _get(port, "/health")[0] == 200
    except OSError:
        return False


def _get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@dataclass(slots=True)
class Stream:
    """One client, which asks when its time has come and reads to the end. A pause is a gap in which the stream said it was parked."""

    begun: float
    first: float = 0.0
    last: float = 0.0
    text: str = ""
    reason: str | None = None
    error: str = ""
    num_tokens: int = 0
    num_prompt: int = 0
    gaps: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    _was_parked: bool = False

    def run(self, port: int, path: str, body: Mapping[str, Any]) -> None:
        """Ask, and read."""
        time.sleep(max(0.0, self.begun - time.perf_counter()))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        whole = {**body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            connection.request("POST", path, json.dumps(whole), {"content-type": "application/json"})
            with connection.getresponse() as answer:
                if answer.status != 200:
                    self.error = answer.read(400).decode(errors="replace")
                for line in answer:
                    self.take(line.decode().rstrip("\n"))
        except (OSError, http.client.HTTPException) as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            connection.close()

    def take(self, line: str) -> None:
        """A line of the stream, now."""
        now = time.perf_counter()
        self._was_parked = self._was_parked or line.startswith(": parked")
        if not line.startswith("data: {"):
            return
        body = json.loads(line.removeprefix("data: "))
        if error := body.get("error"):
            self.error = str(error["message"])
        if usage := body.get("usage"):
            self.num_tokens, self.num_prompt = usage["completion_tokens"], usage["prompt_tokens"]
        for choice in body.get("choices", []):
            self.reason = choice["finish_reason"] or self.reason
            if said := choice["delta"].get("content") if "delta" in choice else choice["text"]:
                self._note(now)
                self.text += said

    def _note(self, now: float) -> None:
        if self.first:
            (self.pauses if self._was_parked else self.gaps).append(now - self.last)
        self.first, self.last, self._was_parked = self.first or now, now, False
