"""`jaxkv convert SRC DST`: a checkpoint that loads faster than what it was made from."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from jaxkv.cli.arguments import parse
from jaxkv.fetch import cache_folder, resolve_model_path
from jaxkv.interrupt import check_interrupt


@dataclass(frozen=True)
class Args:
    """Write a model's weights as jaxkv keeps them, with its configuration and tokenizer beside them."""

    source: Annotated[Positional[str], arg(metavar="MODEL", help="a model folder, a GGUF file, or a known name such as smollm2")]
    target: Annotated[Positional[Path], arg(help="the folder to write; must not exist yet")]
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], arg(help="what the weights are stored in")] = "float32"
    weight_dtype: Annotated[Literal["auto", "int8"], arg(help="what those of the products are stored in; auto is the same")] = "auto"


def run(words: Sequence[str]) -> int:
    """Convert and print the new folder."""
    args = parse(Args, "convert", words)
    source = resolve_model_path(args.source, cache_folder(None))
    from jaxkv.models.checkpoint import save_converted

    weight_dtype = None if args.weight_dtype == "auto" else args.weight_dtype
    save_converted(source, args.target, args.dtype, lambda done, total: check_interrupt(), weight_dtype)
    print(args.target)
    return 0
