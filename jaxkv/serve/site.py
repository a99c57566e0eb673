"""What all routes share: the service, the configuration, the model's name, and how bodies are read. Owns no route."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

from starlette.requests import Request

from jaxkv.config import Config
from jaxkv.openai import BodyReader
from jaxkv.openai.names import served_name
from jaxkv.serve import errors
from jaxkv.serve.batches import Batches
from jaxkv.serve.interface import ServeEngine
from jaxkv.serve.keys import Keys
from jaxkv.serve.metrics import Meter
from jaxkv.serve.service import Service

BODY_S = 120.0  # for a body to arrive


@dataclass(frozen=True)
class Site:
    """One server."""

    config: Config
    service: Service
    keys: Keys = field(default_factory=lambda: Keys(()))
    operator_keys: Keys = field(default_factory=lambda: Keys(()))
    meter: Meter = field(default_factory=Meter)
    batches: Batches | None = None  # none where the server keeps no files
    responses: Counter[int] = field(default_factory=Counter)  # by status
    started: int = field(default_factory=lambda: int(time.time()))

    def start(self) -> None:
        """Begin what goes on beside requests."""
        if self.batches is not None:
            self.batches.start(self.service)

    async def close(self, seconds: float) -> bool:
        """End everything; whether the engine's thread ended within that time."""
        if self.batches is not None:
            await self.batches.close()
        return await self.service.close(seconds)

    @property
    def model(self) -> str:
        """What clients call the model."""
        return self.config.server.model_name or served_name(self.config.model.path)

    @property
    def engine(self) -> ServeEngine:
        """The engine; raises ApiError while there is none."""
        return self.service.check_open()

    @property
    def max_model_len(self) -> int:
        """Prompt and answer together: the model's limit, or what the pool holds."""
        return min(self.engine.max_len, self.engine.longest_prompt)

    def reader(self) -> BodyReader:
        """Reads bodies for the model that is served."""
        defaults = self.config.request.model_dump(exclude_none=True)
        return BodyReader(self.engine.tokenizer, self.engine.model_config.vocab_size, defaults, self.config.server.max_prompts)

    async def read(self, request: Request) -> bytes:
        """A request's body, up to the largest that is read, and as long as is waited for."""
        most, parts, length = self.config.server.max_body_mib, [], 0
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    length += len(part)
                    if length > most * 2**20:
                        raise errors.too_large(most)
                    parts.append(part)
        except TimeoutError:
            raise errors.too_slow("body", BODY_S) from None
        return b"".join(parts)


def request_id(request: Request) -> str:
    """The id that the gate gave it."""
    return str(request.scope["state"]["request_id"])
