"""What a model takes by its numbers alone: parameters, bytes per token and per sequence, what a device of a given memory holds, and how
long a park takes over a link of a given speed. Reads a config.json at most, never weights; allocates nothing.

    KV bytes of a token        2 x layers that keep pages x kv heads x head dim x bytes of a number (int8: and 4 of a scale for each head),
                               kv heads counted as often as they are on a device of their own (mesh.tensor)
    state bytes of a sequence  jaxkv.models.state_bytes: per recurrent layer a window in the model's dtype and a sum in float32
    image of n tokens          transfer chunks of whole pages, the last one padded, and the states; where layers see a window, theirs
                               of the pages that its next token sees
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxkv.config import Config, num_draft
from jaxkv.config.budget import AUTO_MIB, MIB
from jaxkv.errors import ConfigError
from jaxkv.fetch import cache_folder, resolve_model_path
from jaxkv.models import ModelConfig, check_mesh, inspect_checkpoint, spread, state_bytes, state_shapes
from jaxkv.models.draft_head import draft_config
from jaxkv.models.families import model_class
from jaxkv.models.int8 import is_scale
from jaxkv.models.parameters import abstract_model
from jaxkv.models.read_config import read_config
from jaxkv.models.read_recurrent import HYBRIDS
from jaxkv.models.states import WIDTHS
from jaxkv.pool import cell_len
from jaxkv.pool_size import compiled_width
from jaxkv.speculate.small import check_pair
from jaxkv.windows import image_pages, near_layers, near_pages, sequence_pages

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Sizing:
    """The figures of one configuration. Bytes are of all devices together but where the name says `per_device`."""

    model_type: str
    dtype: str
    weight_dtype: str
    kv_dtype: str
    devices: int
    num_parameters: int
    weight_bytes: int
    weight_bytes_per_device: int
    kv_bytes_per_token: int
    state_bytes_per_sequence: int
    window: str | None  # what layers with a window keep
    max_len: int
    pool_tokens: int | None  # None: the memory decides, and was not told
    pool_bytes: int | None
    bytes_per_device: int | None  # weights, pool, states of all rows, staging
    memory_bytes_per_device: int | None
    fits: bool | None
    sequence_tokens: int
    sequences_in_pool: int | None  # of so many tokens each, without parks; at most the rows
    image_bytes: int  # of one such sequence
    images_in_host_budget: int | None  # None: no limit
    park_s: float
    link_gb_per_s: float

    def to_dict(self) -> dict[str, Any]:
        """By name, as `--json` prints it."""
        return asdict(self)


def read_shape(config: Config, shape: Path | None) -> ModelConfig:
    """The numbers of the model: from `shape`, else from config.json in model.path, else from the headers of what is there."""
    if shape is None:
        try:
            path = resolve_model_path(config.model.path, cache_folder(config.run.cache_dir))
        except ConfigError as error:
            raise ConfigError(f"{error}; without it give its config.json: --shape FILE") from None
        if not (path / "config.json").is_file():
            return inspect_checkpoint(path).config
        shape = path / "config.json"
    try:
        data = json.loads(shape.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {shape}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{shape} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{shape} must hold an object, as a model's config.json does, got a {type(data).__name__}")
    return read_config(data, str(shape))


def kv_bytes_per_token(model: ModelConfig, kv_dtype: str) -> int:
    """Keys and values of one token in all layers that keep pages."""
    return 2 * len(model.page_layers) * model.num_kv_heads * cell_len(kv_dtype, model.head_dim) * WIDTHS[kv_dtype]


def measure(
    config: Config, model: ModelConfig, backend: str, memory_bytes: int | None, link_gb_per_s: float, sequence_tokens: int | None = None
) -> Sizing:
    """All figures. `memory_bytes` is one device's; `sequence_tokens` is model.max_len where it is None."""
    own = "float32" if backend == "cpu" else model.dtype
    dtype = own if config.model.dtype == "auto" else config.model.dtype
    kv_dtype = dtype if config.pool.kv_dtype == "auto" else config.pool.kv_dtype
    num, weight_dtype = config.mesh.tensor, dtype if config.model.weight_dtype == "auto" else config.model.weight_dtype
    token, state = kv_bytes_per_token(spread(model, num), kv_dtype), state_bytes(model, dtype)
    max_len = min(config.model.max_len or model.max_position, model.max_position)
    length = min(sequence_tokens or max_len, max_len)
    parameters, weights, weights_each = weight_numbers(model, dtype, weight_dtype, num)
    guesses = guess_numbers(config, model, dtype, weight_dtype, kv_dtype)
    weights, weights_each = weights + guesses.weight_bytes, weights_each + guesses.weight_bytes_each
    token, beside = token + guesses.head_token_bytes, guesses.small_token_bytes
    rows, width = config.scheduler.rows, compiled_width(config.scheduler.rows)
    step = compiled_width(config.scheduler.prefill_chunk)
    page, chunk = config.pool.page_size, config.transfer.chunk_pages
    each_pages = sequence_pages(model.window, length, config.scheduler.prefill_chunk, page)
    staging = config.transfer.staging_mib * MIB // num
    slots = width + (config.pool.state_snapshots if config.pool.prefix_cache else 0)
    states = slots * state_bytes_each(model, dtype, num)
    fixed = weights_each + states
    free = None if memory_bytes is None else memory_bytes - weights_each
    most = width * sequence_pages(model.window, max_len, step, page) * page
    tokens = pool_tokens(config, token + beside, free, states, most)
    near, window = near_layers(model)
    apart = near_pages(model, width, max_len, max(step, 1 + num_draft(config)), page, (tokens or 0) // page)
    near_token = token * len(near) // len(model.page_layers) if apart and not config.request.context_shift else 0
    far_token, near_bytes = token - near_token, (apart + 1) * page * near_token  # with the trash page
    if near_token:
        tokens = pool_tokens(config, far_token, free, near_bytes // num, most)
    pool = None if tokens is None else (tokens + page) * (far_token + beside) + near_bytes
    image = (
        chunk * page * (chunks(model.window, length, page, chunk) * far_token + chunks(window, length, page, chunk) * near_token) + state
    )
    each = None if pool is None else fixed + staging + -(-pool // num)
    budget = config.scheduler.host_budget_mib
    held = None if budget is None else (AUTO_MIB if budget == "auto" else budget) * MIB
    return Sizing(
        model_type=model.model_type,
        dtype=dtype,
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        devices=num,
        num_parameters=parameters,
        weight_bytes=weights,
        weight_bytes_per_device=weights_each,
        kv_bytes_per_token=token,
        state_bytes_per_sequence=state,
        window=about_window(config, model, tokens, apart * page if near_token else 0, near_bytes),
        max_len=max_len,
        pool_tokens=tokens,
        pool_bytes=pool,
        bytes_per_device=each,
        memory_bytes_per_device=memory_bytes,
        fits=None if each is None or memory_bytes is None else each <= memory_bytes,
        sequence_tokens=length,
        sequences_in_pool=None if tokens is None else min(rows, tokens // page // each_pages) if token else rows,
        image_bytes=image,
        images_in_host_budget=None if held is None else held // image,
        park_s=image / (link_gb_per_s * 1e9),
        link_gb_per_s=link_gb_per_s,
    )


def about_window(config: Config, model: ModelConfig, tokens: int | None, near_tokens: int, near_bytes: int) -> str | None:
    """What the layers with a window keep, where there are any, in a pool of so many tokens."""
    near, window = near_layers(model)
    if model.window is not None:
        return f"{model.window:,} tokens in every layer; no sequence holds more than that, a chunk and a page"
    if not near:
        return None
    seen = f"{window:,} tokens in {len(near)} of {len(model.page_layers)} layers; "
    if near_tokens:
        return f"{seen}{near_tokens:,} tokens of their own, {near_bytes / MIB:.1f} MiB of the pool's bytes"
    if tokens is None and not config.request.context_shift:
        return seen + "what they keep depends on the pool"
    why = "request.context_shift: true" if config.request.context_shift else "pages of their own would be no fewer"
    return f"{seen}all pages are kept: {why}"


@dataclass(frozen=True, slots=True)
class Guesses:
    """What those take who guess (speculate.kind): nothing, a draft head or a small model."""

    weight_bytes: int = 0
    weight_bytes_each: int = 0  # of these on a device
    head_token_bytes: int = 0  # of a token, in the pool and in images
    small_token_bytes: int = 0  # of a token, beside the pool, in no image


def guess_numbers(config: Config, model: ModelConfig, dtype: str, weight_dtype: str, kv_dtype: str) -> Guesses:
    """The figures of the configured kind. The small model is looked at where it is."""
    kind, path, num = config.speculate.kind, config.speculate.draft_path, config.mesh.tensor
    if kind == "mtp":
        if model.model_type not in HYBRIDS:
            raise ConfigError(f"speculate.kind: got mtp, but {model.model_type} has no draft head; take ngram or none")
        head = draft_config(model)
        _, weights, each = weight_numbers(head, dtype, weight_dtype, num)
        return Guesses(weights, each, head_token_bytes=kv_bytes_per_token(spread(head, num), kv_dtype))
    if kind == "draft" and path is not None:
        small = inspect_checkpoint(resolve_model_path(path, cache_folder(config.run.cache_dir))).config
        check_mesh(small, num)
        check_pair(small, model)
        _, weights, each = weight_numbers(small, dtype, dtype, num)
        return Guesses(weights, each, small_token_bytes=kv_bytes_per_token(spread(small, num), kv_dtype))
    return Guesses()


def chunks(window: int | None, num_tokens: int, page: int, chunk_pages: int) -> int:
    """Transfer chunks of an image of so many tokens, of which the next one sees a window."""
    gone, end = image_pages(window, num_tokens, page)
    return -(-end // chunk_pages) - gone // chunk_pages


def state_bytes_each(model: ModelConfig, dtype: str, num: int) -> int:
    """What one sequence's states take on each of `num` devices: sums are split, windows of convolutions are on all."""
    shapes = (shape for layer in state_shapes(model, dtype) for shape in layer)
    return sum(shape.num_bytes if shape.split is None else shape.num_bytes // num for shape in shapes)


def pool_tokens(config: Config, token_bytes: int, free_bytes: int | None, beside: int, most: int) -> int | None:
    """Usable tokens in whole pages: as configured, else a share of the memory of a device that weights leave, less what lies `beside`
    the pool there, and never more than all rows can fill."""
    page, num = config.pool.page_size, config.mesh.tensor
    if not token_bytes:
        return 0  # nothing is kept per token
    if config.pool.tokens is not None:
        return config.pool.tokens // page * page
    if free_bytes is None:
        return None
    share = free_bytes * config.pool.memory_fraction - config.transfer.staging_mib * MIB // num - beside
    return max(0, min(most, (int(share / (token_bytes * page // num)) - 1) * page))


def weight_numbers(model: ModelConfig, dtype: str, weight_dtype: str, num: int) -> tuple[int, int, int]:
    """How many parameters there are, and the bytes of all weights and of those on one of `num` devices."""
    narrow = "int8" if weight_dtype == "int8" else None
    family, (_, variables) = model_class(model.model_type), abstract_model(model, dtype, narrow)
    each = 0
    for path, variable in abstract_model(spread(model, num), dtype, narrow)[1].items():
        is_split = any(axis is not None for axis in family.partition(path, variable.shape, num))
        each += num_bytes(variable) // (num if is_split else 1)
    parameters = sum(math.prod(variable.shape) for path, variable in variables.items() if not is_scale(path))
    return parameters, sum(map(num_bytes, variables.values())), each


def num_bytes(variable: Any) -> int:
    """What a parameter takes."""
    return math.prod(variable.shape) * int(variable.dtype.itemsize)
