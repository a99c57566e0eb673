"""What one run comes to, on the engine or on the simulator: figures of the same names, a line for each sequence, who held the pool."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxkv.simulate.result import Result, Story
from jaxkv.simulate.timeline import PoolTimeline


@dataclass(frozen=True, slots=True)
class Outcome:
    """`figures` are those of every run, `more` those that only an engine has; `facts` go into the manifest."""

    figures: Result
    more: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]
    timeline: PoolTimeline
    outputs_sha256: str
    facts: Mapping[str, Any]


def story_line(custom_id: str, choice: int, story: Story) -> dict[str, Any]:
    """A sequence as outputs.jsonl has it."""
    return {
        "custom_id": custom_id,
        "choice": choice,
        "ended": story.ended,
        "num_tokens": story.num_tokens,
        "arrival_s": round(story.arrival_s, 6),
        "end_s": round(story.end_s, 6),
        "line_s": round(story.line_s, 6),
        "pauses_s": [round(pause, 6) for pause in story.pauses_s],
    }


def timeline_dict(timeline: PoolTimeline) -> dict[str, Any]:
    """As timeline.json has it: pages by sequence at each time, and when each was parked."""
    thin = timeline.thinned() if timeline.times else timeline
    return {
        "num_pages": thin.num_pages,
        "times_s": [round(time, 6) for time in thin.times],
        "pages": [{str(seq_id): num for seq_id, num in held.items()} for held in thin.pages],
        "parked_s": {str(seq_id): [[round(a, 6), round(b, 6)] for a, b in spans] for seq_id, spans in thin.parked.items()},
    }


def read_timeline(data: Mapping[str, Any]) -> PoolTimeline:
    """The other way round."""
    pages = [{int(seq_id): num for seq_id, num in held.items()} for held in data["pages"]]
    parked = {int(seq_id): [(a, b) for a, b in spans] for seq_id, spans in data["parked_s"].items()}
    return PoolTimeline(list(data["times_s"]), pages, parked, data["num_pages"])
