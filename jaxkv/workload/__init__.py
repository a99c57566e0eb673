"""Load, described once: what requests a `workload` section draws (`draw`), in what form they are measured and repeated (`trace`), the texts
they may hold (`prompts`), as bodies of OpenAI's API (`bodies`), and how a job is split among machines (`shard`).

The engine, the simulator, a server's client and other engines all take the same requests from here. Knows none of them, and imports no JAX.
"""

from jaxkv.workload.draw import draw
from jaxkv.workload.shard import Shard
from jaxkv.workload.trace import Request, read_trace

__all__ = ["Request", "Shard", "draw", "read_trace"]
