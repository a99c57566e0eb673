"""The fields that describe an experiment: what load there is, what a step costs in the simulator, what is varied. Draws nothing.

`workload` is one description for all who make or take a load: the engine, the simulator, clients of a server, other engines.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from jaxkv.config.section import MAX_SEED, Section

Lengths = Literal["fixed", "uniform", "lognormal", "heavy", "trace"]
Arrivals = Literal["at_once", "staggered", "poisson", "bursty", "trace"]

KINDS: dict[str, tuple[Lengths, Arrivals]] = {
    "uniform": ("uniform", "at_once"),
    "heavy": ("heavy", "at_once"),
    "poisson": ("uniform", "poisson"),
    "bursty": ("uniform", "bursty"),
    "measured": ("trace", "trace"),
}


def _lists(value: Any) -> Any:
    """Lists as tuples; what is no list stays as it is, to be refused."""
    return {key: tuple(part) if isinstance(part, list) else part for key, part in value.items()} if isinstance(value, dict) else value


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _names(value: Any) -> Any:
    """A lone name for a list of one, too."""
    return (value,) if isinstance(value, str) else _as_tuple(value)


class WorkloadSection(Section):
    """Requests: how many, how long, when, how urgent."""

    kind: Literal["uniform", "heavy", "poisson", "bursty", "measured"] = Field(
        default="uniform", description="lengths and arrivals together; measured takes both from a trace"
    )
    lengths: Lengths | None = Field(default=None, description="how prompts and answers are drawn; null is what the kind has")
    arrivals: Arrivals | None = Field(default=None, description="when requests come; null is what the kind has")
    num_requests: int = Field(default=8, ge=1, description="how many, where lengths are drawn")
    prompt_len_min: int = Field(default=64, ge=1, description="shortest prompt in tokens")
    prompt_len_max: int = Field(default=512, ge=1, description="longest prompt in tokens, and the only length if fixed")
    answer_len_min: int = Field(default=256, ge=1, description="shortest answer in tokens")
    answer_len_max: int = Field(default=4096, ge=1, description="longest answer in tokens, and the only length if fixed")
    max_tokens: int | None = Field(
        default=None, ge=1, description="what each request asks for at most, its answer if that is longer; null asks for exactly its answer"
    )
    every_s: float = Field(default=3.0, ge=0, description="seconds between two arrivals, in the mean; between two bursts if bursty")
    burst: int = Field(default=4, ge=1, description="requests that arrive together if bursty")
    priorities: Annotated[tuple[int, ...], BeforeValidator(_as_tuple)] = Field(
        default=(0,), min_length=1, description="each request has one of these, drawn evenly"
    )
    choices: Annotated[tuple[Annotated[int, Field(ge=1, le=128)], ...], BeforeValidator(_as_tuple)] = Field(
        default=(1,), min_length=1, description="each request is a group of so many choices, one of these numbers, drawn evenly"
    )
    cancels: float = Field(
        default=0.0, ge=0, le=1, description="share of requests whose caller leaves, after a number of tokens that is drawn"
    )
    shared_prefix_len: int = Field(default=0, ge=0, description="tokens that all generated prompts begin with, in common")
    prompts: Annotated[tuple[str, ...], BeforeValidator(_names, json_schema_input_type=str | list[str])] = Field(
        default=(), description="files or globs of prompts: .txt and .md hold one, .csv and .jsonl one a row; none generates token ids"
    )
    template: str | None = Field(
        default=None, min_length=1, description="the prompt of a row, with {column} for its values; null is the column prompt"
    )
    chat: bool = Field(default=False, description="whether a prompt from a file is the message of a chat")
    patient: bool = Field(default=False, description="nobody waits for single tokens, as in a batch job: see scheduler.prefill_burst")
    trace: str | None = Field(default=None, min_length=1, description="a file that `jaxkv batch --record-trace` wrote")
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="what all draws come from")

    @property
    def parts(self) -> tuple[Lengths, Arrivals]:
        """Where lengths and arrivals come from."""
        lengths, arrivals = KINDS[self.kind]
        return self.lengths or lengths, self.arrivals or arrivals

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        """Refuse empty ranges and a trace that is not named."""
        for name in ("prompt_len", "answer_len"):
            least, most = getattr(self, f"{name}_min"), getattr(self, f"{name}_max")
            if least > most:
                raise ValueError(f"workload.{name}_min: got {least}, more than workload.{name}_max, which is {most}: swap or change them")
        if self.template is not None and not self.prompts:
            raise ValueError("workload.template: is there, but workload.prompts names no file with rows to fill it from")
        if "trace" in self.parts and self.trace is None:
            raise ValueError("workload.trace: is missing, and the lengths or arrivals are to come from it; name the file")
        return self


def _cost(description: str) -> Any:
    return Field(default=None, ge=0, description=description)


class SimulateSection(Section):
    """What a step takes in the simulator; null is what the costs file says, else what was measured with SmolLM2 on two CPU cores."""

    costs: str | None = Field(default=None, min_length=1, description="a file that `jaxkv calibrate` wrote")
    step_s: float | None = _cost("seconds that a step takes beside its programs")
    decode_s: float | None = _cost("seconds of a decode step with empty rows")
    decode_longest_s: float | None = _cost("seconds more for each token of the longest row")
    decode_token_s: float | None = _cost("seconds more for each token of any row")
    prefill_s: float | None = _cost("seconds of a prompt chunk at the beginning")
    prefill_token_s: float | None = _cost("seconds more for each token before the chunk")
    copy_s: float | None = _cost("seconds that one transfer chunk adds to the step it leaves in")
    land_s: float | None = _cost("seconds until one transfer chunk has arrived, one after another")
    token_bytes: int | None = Field(default=None, ge=1, description="bytes of one token in the pool")
    processes: int | None = Field(default=None, ge=1, description="simulations at a time; null is one for each processor")


class SweepSection(Section):
    """What is compared: every combination of the grid's values, each with every seed."""

    grid: Annotated[dict[str, tuple[Any, ...]], BeforeValidator(_lists)] = Field(
        default={}, description="field names with a list of values each: every combination is a case"
    )
    zip: Annotated[dict[str, tuple[Any, ...]], BeforeValidator(_lists)] = Field(
        default={}, description="field names with lists of one length: their first values together are a case, their second, and so on"
    )
    seeds: int = Field(default=1, ge=1, description="each case is run with workload.seed, workload.seed + 1, ...")
    repeats: int = Field(default=1, ge=1, description="how often each of these is run again; all others take turns in between")
