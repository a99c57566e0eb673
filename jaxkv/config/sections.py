"""Every field of a configuration: its name, type, range, default and one sentence about it. Knows nothing of files or command lines."""

import warnings
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

import yaml
from pydantic import BeforeValidator, Field, model_validator

from jaxkv.config.section import MAX_SEED, Section
from jaxkv.config.server import ServerSection
from jaxkv.config.workload import SimulateSection, SweepSection, WorkloadSection
from jaxkv.scheduler.policies import RETURNS, VICTIMS


def _as_tuple(value: Any) -> Any:
    """Let a list stand for a tuple and a lone value for a list of one, as OpenAI's `stop` does."""
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, str | int) and not isinstance(value, bool) else value


def _text_keys(value: Any) -> Any:
    """Token ids as text, which is how JSON writes the keys of `logit_bias`."""
    return {str(key): number for key, number in value.items()} if isinstance(value, dict) else value


StopList = Annotated[list[str], Field(max_length=16)]
Stops = Annotated[tuple[str, ...], Field(max_length=16), BeforeValidator(_as_tuple, json_schema_input_type=str | StopList)]
TokenIds = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_as_tuple, json_schema_input_type=int | list[int])]


if TYPE_CHECKING:
    VictimName: TypeAlias = str
    ReturnName: TypeAlias = str
else:  # whatever stands in the dicts of policies
    VictimName, ReturnName = Literal[tuple(VICTIMS)], Literal[tuple(RETURNS)]


class ModelSection(Section):
    """Which weights to load, and how."""

    path: str = Field(min_length=1, description="a model folder, a GGUF file, or a known name such as smollm2")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="what weights and arithmetic use; auto is float32 on a CPU, elsewhere the checkpoint's own"
    )
    weight_dtype: Literal["auto", "int8"] = Field(
        default="auto",
        description="what the weights of products are stored in; auto is model.dtype, or int8 where a converted folder holds them so; int8 "
        "has a scale for each output channel",
    )
    max_len: int | None = Field(
        default=None, ge=2, description="longest sequence in tokens, prompt and answer together; null is the model's own limit"
    )


class PoolSection(Section):
    """The device memory that holds keys and values."""

    tokens: int | None = Field(
        default=None, ge=1, description="usable tokens, rounded down to whole pages; null takes a share of the device's memory"
    )
    page_size: int = Field(default=16, ge=1, description="tokens per page")
    memory_fraction: float = Field(
        default=0.8, gt=0, le=1, description="share of the device's free memory the pool takes when tokens is null"
    )
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = Field(
        default="auto", description="what keys and values are stored in; auto is model.dtype; int8 has a scale for each token and kv head"
    )
    prefix_cache: bool = Field(
        default=True, description="prompt pages stay in the pool, while there is room, for requests that begin alike; no answer changes"
    )
    state_snapshots: int = Field(
        default=0,
        ge=0,
        description="states kept on the device where prompts of models with states may be found again; with 0 they are computed anew",
    )


class SchedulerSection(Section):
    """Who runs, who is parked, who returns."""

    rows: int = Field(default=8, ge=1, description="sequences decoded together")
    prefill_chunk: int = Field(default=64, ge=1, description="prompt tokens computed in one step")
    prefill_burst: int = Field(
        default=16,
        ge=1,
        description="prompt chunks in a row where nobody waits for single tokens, as in batch jobs; 1 is a token after each",
    )
    overlap: bool = Field(
        default=False,
        description="begin the next step before the last one's tokens have been read: the device does not wait for the host",
    )
    victim: VictimName = Field(default="smallest", description="which resident of the least urgent priority is parked when room is needed")
    resume: ReturnName = Field(
        default="head",
        description="who comes in: head is the one parked longest, and nobody passes it; pass is whoever fits, the most often parked first",
    )
    max_bypass: int | None = Field(default=None, ge=0, description="how many may pass the first in line with pass; null is any number")
    admission: Literal["optimistic", "reserve"] = Field(
        default="optimistic", description="reserve lets one in only when all it may ever need is free, and never parks"
    )
    rotate: Literal["shifted", "any", "none"] = Field(
        default="shifted", description="which residents are parked for a head that waits long: those that shifted their context, any, none"
    )
    rotate_after_s: float = Field(
        default=2.0, ge=0, allow_inf_nan=False, description="seconds that a head waits before a resident is parked for it, and then stays"
    )
    margin_steps: int = Field(
        default=8, ge=0, description="decode steps of every running row that must have room before a sequence is let in"
    )
    starve_after: int = Field(default=3, ge=1, description="a sequence parked this often is passed over while there is another to park")
    host_budget_mib: Annotated[int, Field(ge=0)] | Literal["auto"] | None = Field(
        default="auto",
        description="MiB of host memory for parked sequences; auto is 8192, or half of what is available; null is no limit, 0 holds none",
    )
    over_budget: Literal["replay", "wait"] = Field(
        default="replay",
        description="an image that does not fit: replay drops it and computes it again; wait lets its sequence keep its pages and pause",
    )
    keep_images: bool = Field(
        default=True, description="after a return, what will not change stays in host memory while there is room: the next park copies less"
    )


class TransferSection(Section):
    """How a sequence's pages travel between device and host."""

    mode: Literal["auto", "direct", "staged", "hold"] = Field(
        default="auto",
        description="direct copies pages straight to host memory, staged aside first, and both are free at once; hold keeps them until the "
        "copy is done; auto is direct on a CPU, elsewhere staged",
    )
    chunk_pages: int = Field(default=16, ge=1, description="pages moved by one transfer")
    chunks_per_step: int = Field(default=4, ge=1, description="transfers started in one step, parks and restores together")
    staging_mib: int = Field(default=64, ge=1, description="device memory for copies in flight in MiB, set aside before the pool is sized")
    blocking: bool = Field(default=False, description="wait for every copy, for backends that cannot copy beside the computation")
    timeout_s: float = Field(default=60.0, gt=0, description="a copy not done after this long is void, and its sequence computed again")


class SpeculateSection(Section):
    """Who guesses the next tokens, so that a decode step checks several at once. No guess changes an answer."""

    kind: Literal["none", "ngram", "mtp", "draft"] = Field(
        default="none",
        description="ngram guesses what followed the last tokens when they stood in the prompt or the answer before, mtp asks the model's "
        "own draft head, draft the small model in draft_path",
    )
    draft_path: str | None = Field(default=None, min_length=1, description="a small model with the same tokenizer, as model.path is given")
    num_draft: int = Field(default=3, ge=1, le=16, description="tokens guessed for each row and checked in one decode step")

    @model_validator(mode="after")
    def _somebody_guesses(self) -> Self:
        """Refuse to ask a model that is not named."""
        if self.kind == "draft" and self.draft_path is None:
            raise ValueError("speculate.draft_path: got null with speculate.kind draft; give a small model with the same tokenizer")
        return self


class MeshSection(Section):
    """How many devices work together."""

    tensor: int = Field(
        default=1, ge=1, description="devices that share every layer; divides the model's heads, and its kv heads or is a multiple of them"
    )


class DebugSection(Section):
    """Knobs for tests and experiments: none of them may change an answer."""

    park_every: int = Field(
        default=0, ge=0, description="park every sequence after every N of its own tokens and after each prompt chunk; 0 is off"
    )
    park_seed: int | None = Field(default=None, ge=0, le=MAX_SEED, description="park at random moments drawn from this seed; null is off")
    copy_delay_steps: int = Field(default=0, ge=0, description="look at a finished copy only N steps later")
    planner: bool = Field(default=True, description="false parks only when a step has no room left, as a last resort")
    reject_drafts: bool = Field(default=False, description="check guesses as speculate says, and take none of them")


class RequestSection(Section):
    """Defaults for the fields of a request's body; null leaves OpenAI's default."""

    max_tokens: int | None = Field(default=None, ge=0, description="longest answer in tokens")
    min_tokens: int | None = Field(default=None, ge=0, description="no stop before this many tokens")
    temperature: float | None = Field(default=None, ge=0, description="0 takes the likeliest token")
    top_p: float | None = Field(default=None, gt=0, le=1, description="sample from the likeliest tokens that hold this share")
    top_k: int | None = Field(default=None, ge=0, description="sample from this many likeliest tokens; 0 is all")
    min_p: float | None = Field(default=None, ge=0, le=1, description="sample from tokens at least this share as likely as the likeliest")
    seed: int | None = Field(
        default=None, ge=0, le=MAX_SEED, description="seed of every request; null derives one per request from run.seed"
    )
    stop: Stops | None = Field(default=None, description="strings that end an answer")
    stop_token_ids: TokenIds | None = Field(default=None, description="token ids that end an answer")
    ignore_eos: bool | None = Field(default=None, description="go on after the model's end-of-text token")
    presence_penalty: float | None = Field(default=None, ge=-2, le=2, description="subtracted once from tokens already generated")
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2, description="subtracted per use from tokens already generated")
    repetition_penalty: float | None = Field(default=None, gt=0, description="divides the score of tokens seen before; 1 is off")
    logit_bias: Annotated[dict[str, float], BeforeValidator(_text_keys)] | None = Field(
        default=None, description="added to the score of a token id before sampling"
    )
    logprobs: bool | Annotated[int, Field(ge=0, le=20)] | None = Field(
        default=None, description="report log probabilities: true or false for chats, a number for completions"
    )
    top_logprobs: int | None = Field(default=None, ge=0, le=20, description="how many likeliest tokens to report at each place of a chat")
    return_token_ids: bool | None = Field(default=None, description="put token_ids beside each choice's text")
    return_cached_tokens: bool | None = Field(default=None, description="put the prompt tokens found in the pool into usage")
    n: int | None = Field(default=None, ge=1, le=128, description="choices for each prompt, which share its pages")
    cache_prompt: bool | None = Field(default=None, description="false shares prompt pages with no other request")
    cache_salt: str | None = Field(default=None, description="requests with different ones share no prompt pages")
    context_shift: bool | None = Field(default=None, description="a full context drops tokens and goes on; null is false")
    context_len: int | None = Field(default=None, ge=1, description="tokens of a context that shifts; null is the model's limit")
    n_keep: int | None = Field(default=None, ge=0, description="first tokens that no shift drops, in whole pages; null is 0")
    n_discard: int | None = Field(
        default=None, ge=1, description="tokens that a shift drops after them, in whole pages; null is half of what is not kept"
    )


class RunSection(Section):
    """What belongs to this run as a whole."""

    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="requests without a seed take one from this and their custom_id")
    cache_dir: str | None = Field(
        default=None, description="folder for weights and compiled programs; null is $JAXKV_CACHE, else the user's cache folder"
    )
    compile_guard: bool = Field(default=True, description="a compilation after warm-up is an error")


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message='Field name "json"', category=UserWarning)  # pydantic has an old method of that name

    class LogSection(Section):
        """What is told of a run while it goes on; prompts and answers never are."""

        level: Literal["warning", "info", "debug"] = Field(
            default="warning",
            description="warning tells failures and refused parks; info each park, restore and start-up stage; debug each request too",
        )
        json: bool = Field(default=False, description="one JSON object a line")  # type: ignore[assignment]
        file: str | None = Field(default=None, min_length=1, description="a file to add lines to; null is standard error")


class Config(Section):
    """The whole description of a run."""

    model: ModelSection
    pool: PoolSection = PoolSection()
    scheduler: SchedulerSection = SchedulerSection()
    transfer: TransferSection = TransferSection()
    speculate: SpeculateSection = SpeculateSection()
    mesh: MeshSection = MeshSection()
    debug: DebugSection = DebugSection()
    request: RequestSection = RequestSection()
    log: LogSection = LogSection()
    run: RunSection = RunSection()
    server: ServerSection = ServerSection()
    workload: WorkloadSection = WorkloadSection()
    simulate: SimulateSection = SimulateSection()
    sweep: SweepSection = SweepSection()

    @model_validator(mode="after")
    def _pool_holds_a_chunk(self) -> Self:
        """Refuse a pool that could never take a step of prefill."""
        pool, chunk = self.pool, self.scheduler.prefill_chunk
        if pool.tokens is not None and (usable := pool.tokens // pool.page_size * pool.page_size) < chunk:
            raise ValueError(
                f"the pool holds {usable} tokens in whole pages of {pool.page_size}, less than one prompt chunk of {chunk}: "
                "raise pool.tokens or lower scheduler.prefill_chunk"
            )
        return self

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain dicts, lists and scalars, every default written out."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """The configuration as a YAML text that loads to the same configuration."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)  # in ASCII: left as it is, U+0085 would come back as a space
