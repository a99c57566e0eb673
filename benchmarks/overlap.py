"""Steps per second with `scheduler.overlap` off and on: what it gains that the device need not wait for the host.

The ceiling: a step takes device + host where the one waits for the other, and max(device, host) where they work side by side, so at best
twice as many steps, where both take as long; next to nothing where the host's part is small, as with a large model on a CPU. The host and
an XLA:CPU device share the processors: where other work, or the step itself, keeps all of them busy there is nothing to gain.
"""

from typing import Any

from common import Setup, clear, run, say, seat, summary, text, timed, turns

from jaxkv.engine import Engine

OPTIONS: dict[str, Any] = {
    "rows": (8, 32, 64),
    "prompt": 24,  # tokens
    "steps": 50,  # timed at once
}
WARM_STEPS = 5


def measure(setup: Setup) -> dict[str, Any]:
    """All figures, by number of rows."""
    return {"prompt_tokens": setup.options.prompt, "rows": {str(num): _compare(setup, num) for num in setup.options.rows}}


def _compare(setup: Setup, num: int) -> dict[str, Any]:
    """Two engines with so many rows, all busy, in turns."""
    o = setup.options
    pool = num * (o.prompt + _most(num, o.steps))
    fields = {on: {"scheduler.rows": num, "pool.tokens": pool, "scheduler.overlap": on} for on in (False, True)}
    times: dict[bool, list[float]] = {False: [], True: []}
    with setup.engines(fields) as engines:
        for round_ in range(setup.rounds):
            for on in turns([False, True], round_):
                times[on].append(_step_s(engines[on], num, o.prompt, o.steps))
    off_ms, on_ms = (summary(times[on], 1e3) for on in (False, True))
    gains = summary([off / on for off, on in zip(times[False], times[True], strict=True)], 1.0)
    gain = round(off_ms["median"] / on_ms["median"], 3)
    say(f"{num} rows: {text(off_ms, 'ms')} a step without, {text(on_ms, 'ms')} with overlap: {gain} times as many")
    return {"off_ms": off_ms, "on_ms": on_ms, "gain": gain, "gain_by_round": gains}


def _most(num: int, steps: int) -> int:
    """Tokens of an answer: the first prompt is computed some steps before the last, and nobody ends while time is taken."""
    return 2 * num + steps + WARM_STEPS + 16


def _step_s(engine: Engine, num: int, prompt: int, steps: int) -> float:
    """Seconds of one of so many steps in which every row makes a token."""
    handles = seat(engine, [prompt] * num, _most(num, steps))
    for _ in range(WARM_STEPS):
        engine.step()

    def many() -> None:
        for _ in range(steps):
            engine.step()

    took_s = timed(many)
    assert not any(handle.done for handle in handles), "every row is busy to the end"
    clear(engine, handles)
    return took_s / steps


if __name__ == "__main__":
    run(__doc__, measure, rounds=8, options=OPTIONS)
