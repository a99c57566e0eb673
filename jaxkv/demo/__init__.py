"""The demo: eight chats through a pool that is too small, and the same eight twice more to compare with. Uses the engine as anybody could.

`chats` says what is asked and how big the pool is, `play` runs it, `frame` and `view` draw it, `watch` shows it while it runs, `table` says
what came out, `run` puts these in order.
"""

from jaxkv.demo.run import run_demo

__all__ = ["run_demo"]
