"""How long one decode step takes, and how far that is from what the machine can do.

The ceiling, measured in the same run. A decode step reads every weight once, whatever the number of rows, so it takes at least weight
bytes / memory bandwidth. And it cannot be faster than its matrix products alone (the same model with an attention that does nothing),
which say what XLA makes of that limit at so many rows. The rest is attention, sampler and, in `Engine.step`, the host's own work:
host share = 1 - device / step, where device is the program's time when several are dispatched at once and only the last is waited for.

Attention must follow the lengths in use and not the size of the pool: so the step is timed in two pools (flat, if all is well), and with
one long row among short ones, between all short and all long.
"""

from typing import Any

from ceilings import Programs, products, weight_bytes
from common import Setup, clear, median_s, read_bandwidth, run, say, seat, summary, text, timed, turns

from jaxkv.engine import Engine

OPTIONS: dict[str, Any] = {
    "rows": (1, 4, 8, 16),
    "contexts": (64, 200, 500),
    "step_context": 200,  # where Engine.step is compared with its program
    "long": 2000,  # tokens of the one long row
    "short": 100,
    "large_pool": 4,  # times the small one
    "repeats": 5,  # steps per number and round
}


def measure(setup: Setup) -> dict[str, Any]:
    """All figures."""
    o = setup.options
    longest = _longest(setup)
    contexts = sorted({min(context, longest) for context in o.contexts})
    bandwidth = read_bandwidth()
    say("Rows")
    fields = {num: {"scheduler.rows": num, "pool.tokens": num * (max(contexts) + 64)} for num in o.rows}
    with setup.engines(fields) as engines:
        num_bytes = weight_bytes(next(iter(engines.values())))
        rows = [_Rows(engine, num, contexts, min(o.step_context, longest), o.repeats) for num, engine in engines.items()]
        bandwidths = []
        for round_ in range(setup.rounds):
            bandwidths.append(bandwidth())
            for one in turns(rows, round_):
                one.measure()
        floor_s = num_bytes / max(bandwidths)
        found = {str(one.num): one.results(floor_s) for one in rows}
    results = {
        "weight_mb": round(num_bytes / 1e6, 1),
        "bandwidth_gb_s": summary(bandwidths, 1e-9, 2),
        "bandwidth_floor_ms": round(floor_s * 1e3, 3),
        "rows": found,
        **_pools(setup, longest),
    }
    speed = text(results["bandwidth_gb_s"], "GB/s")
    say(f"weights {results['weight_mb']} MB at {speed}: at least {results['bandwidth_floor_ms']} ms a step")
    return results


class _Rows:
    """One engine with so many rows, all busy."""

    def __init__(self, engine: Engine, num: int, contexts: list[int], step_context: int, repeats: int) -> None:
        self.num = num
        self._repeats = repeats
        programs = Programs(engine)
        self._by_context = {context: programs.decode([context] * num) for context in contexts}
        self._same = programs.decode([step_context] * num)
        self._many = programs.decode([step_context] * num, repeats)
        self._products = products(engine, max(2, num), max(2, num))
        self._engine = engine
        self._step_context = step_context
        self._times: dict[str, list[float]] = {}

    def measure(self) -> None:
        """One round."""
        for context, step in self._by_context.items():
            self._note(f"at {context}", median_s(step, self._repeats))
        self._note("products", median_s(self._products, self._repeats))
        handles = seat(self._engine, [max(1, self._step_context - self._repeats)] * self.num, 4 * self._repeats)
        pairs = [(timed(self._engine.step), timed(self._same)) for _ in range(self._repeats)]
        self._note("device", timed(self._many) / self._repeats)
        clear(self._engine, handles)
        for name, values in zip(("step", "program"), zip(*pairs, strict=True), strict=True):
            self._note(name, sorted(values)[len(values) // 2])

    def _note(self, name: str, seconds: float) -> None:
        self._times.setdefault(name, []).append(seconds)

    def results(self, floor_s: float) -> dict[str, Any]:
        """Medians over the rounds, and the ratios of those medians."""
        ms = {name: summary(values, 1e3) for name, values in self._times.items()}
        step, device, alone = (ms[name]["median"] for name in ("step", "device", "products"))
        found = {
            "program_ms": {name.removeprefix("at "): value for name, value in ms.items() if name.startswith("at ")},
            "products_ms": ms["products"],
            "engine_step_ms": ms["step"],
            "engine_program_ms": ms["program"],
            "device_ms": ms["device"],
            "host_share": round(1 - device / step, 4),
            "tokens_per_s": round(self.num / step * 1e3, 1),
            "products_of_step": round(alone / step, 3),
            "bandwidth_of_step": round(floor_s * 1e3 / step, 3),
        }
        say(f"{self.num} rows: step {text(ms['step'], 'ms')}, device {text(ms['device'], 'ms')}, products {text(ms['products'], 'ms')}")
        return found


def _pools(setup: Setup, longest: int) -> dict[str, Any]:
    """The same step in two pools, and the skewed lengths in the larger one."""
    o, num = setup.options, setup.config().scheduler.rows
    long, short = min(o.long, longest), min(o.short, longest)
    small = num * (short + 64)
    large = max(small * o.large_pool, num * (long + 16))
    say("Pools and lengths")
    with setup.engines({size: {"pool.tokens": size} for size in (small, large)}) as engines:
        programs = {size: Programs(engine) for size, engine in engines.items()}
        steps = {f"pool {size}": one.decode([short] * num) for size, one in programs.items()}
        lengths = {"all_short": [short] * num, "one_long": [long] + [short] * (num - 1), "all_long": [long] * num}
        steps |= {name: programs[large].decode(value) for name, value in lengths.items()}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for round_ in range(setup.rounds):
            for name in turns(list(steps), round_):
                times[name].append(median_s(steps[name], o.repeats))
    ms = {name: summary(values, 1e3) for name, values in times.items()}
    for name, value in ms.items():
        say(f"{name}: {text(value, 'ms')}")
    return {
        "pool_ms": {str(size): ms[f"pool {size}"] for size in (small, large)},
        "pool_large_over_small": round(ms[f"pool {large}"]["median"] / ms[f"pool {small}"]["median"], 3),
        "lengths": {"long": long, "short": short},
        "lengths_ms": {name: ms[name] for name in lengths},
    }


def _longest(setup: Setup) -> int:
    """The longest context that leaves room for the steps that are timed."""
    from jaxkv.fetch import cache_folder, resolve_model_path
    from jaxkv.models import inspect_checkpoint

    config = setup.config()
    info = inspect_checkpoint(resolve_model_path(config.model.path, cache_folder(config.run.cache_dir)))
    return (config.model.max_len or info.config.max_position) - 8 * setup.options.repeats


if __name__ == "__main__":
    run(__doc__, measure, rounds=5, options=OPTIONS)
