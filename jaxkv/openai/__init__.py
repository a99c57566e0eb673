"""OpenAI's request bodies and answers, for batch jobs and for a server: from a body to prompt ids and parameters, from a completion back.

Knows nothing of files, sockets or the engine's inside.
"""

from jaxkv.openai.answers import Frame, build_answer, error_body
from jaxkv.openai.body import BodyReader, Endpoint, ParsedBody, derive_seed

__all__ = ["BodyReader", "Endpoint", "Frame", "ParsedBody", "build_answer", "derive_seed", "error_body"]
