"""Batch jobs: files of requests in, one file of answers out, in the OpenAI batch format; killed and started again, nothing is lost.

Knows of the engine only what `interface` says.
"""

from jaxkv.batch.job import run_batch

__all__ = ["run_batch"]
