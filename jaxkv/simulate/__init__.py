"""The simulator: the engine's own scheduler behind a cost model, with a clock that nobody waits for.

`jaxkv.workload` says what load there is, `costs` what a step takes, `run` is the loop, `result` what came of it; `cases` and `sweep` make
many runs out of one configuration, `table` and `plots` show them. Imports the scheduler, never JAX.
"""

from jaxkv.simulate.costs import Costs
from jaxkv.simulate.result import Result
from jaxkv.simulate.run import simulate
from jaxkv.simulate.sweep import run_sweep
from jaxkv.workload import Request, draw

__all__ = ["Costs", "Request", "Result", "draw", "run_sweep", "simulate"]
