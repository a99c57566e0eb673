"""The compile guard: raises when anything is compiled while a warmed-up engine takes a step. Knows only JAX's own compile event."""

import jax

from jaxkv.errors import JaxkvError

_EVENT = "/jax/core/compile/backend_compile_duration"
_watching: list["CompileGuard"] = []


class CompileGuard:
    """`with guard:` around a step counts compilations in `num_compiles`, and raises on one if `strict`."""

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict
        self.num_compiles = 0

    def __enter__(self) -> "CompileGuard":
        _listen_once()
        _watching.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _watching.remove(self)

    def saw_compile(self) -> None:
        """Called from inside the compilation."""
        self.num_compiles += 1
        if self.strict:
            raise RecompileError


class RecompileError(JaxkvError):
    """A program was compiled after warm-up."""

    def __init__(self) -> None:
        super().__init__(
            "a program was compiled after warm-up: 1 compilation, 0 allowed. Something ran outside the compiled programs; "
            "set run.compile_guard to false to go on, and report it"
        )


def _on_event(event: str, duration_secs: float, **_: str | int) -> None:
    if event == _EVENT and _watching:
        _watching[-1].saw_compile()


def _listen_once() -> None:
    """JAX keeps listeners for the life of the process and offers no way to remove one, so there is exactly one."""
    if not getattr(_listen_once, "done", False):
        jax.monitoring.register_event_duration_secs_listener(_on_event)
        _listen_once.done = True  # type: ignore[attr-defined]
