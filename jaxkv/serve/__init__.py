"""The HTTP server: OpenAI's endpoints over one engine. `service` runs the engine in a thread of its own, everything else is an event loop.

Needs the packages of the extra `server`. Knows no page, no row and no JAX.
"""
