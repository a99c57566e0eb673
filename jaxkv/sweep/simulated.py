"""One run on the simulator. Imports no JAX."""

import hashlib
import json

from jaxkv.config import Config
from jaxkv.simulate.cases import make_case
from jaxkv.simulate.run import simulate
from jaxkv.simulate.timeline import PoolTimeline
from jaxkv.sweep.outcome import Outcome, story_line


def run_simulated(config: Config) -> Outcome:
    """The same configuration gives the same outcome, on every machine."""
    case, timeline = make_case(config.to_dict(), {}), PoolTimeline()
    requests = case.requests(0)
    result, stories = simulate(case.settings, requests, case.costs, case.num_staging, timeline)
    names = [(f"request-{i:06d}", choice) for i, request in enumerate(requests) for choice in range(request.n)]
    lines = [story_line(custom_id, choice, story) for (custom_id, choice), story in zip(names, stories, strict=True)]
    digest = hashlib.sha256("".join(json.dumps(line) + "\n" for line in lines).encode()).hexdigest()
    return Outcome(result, {}, lines, timeline, digest, {"costs": case.costs.to_dict()})
