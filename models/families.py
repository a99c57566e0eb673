"""Which model families exist: `model_type` to class, as strings, so that reading a config imports no Flax."""

from importlib import import_module
from typing import Any

from jaxkv.models.errors import ModelError

FAMILIES: dict[str, str] = {
    "gemma3_text": "jaxkv.models.gemma3_text:Gemma3Text",
    "llama": "jaxkv.models.llama:Llama",
    "mamba": "jaxkv.models.mamba:Mamba",
    "mamba2": "jaxkv.models.mamba2:Mamba2",
    "mistral": "jaxkv.models.mistral:Mistral",
    "qwen2": "jaxkv.models.qwen2:Qwen2",
    "qwen3": "jaxkv.models.qwen3:Qwen3",
    "qwen3_5": "jaxkv.models.qwen3_5:Qwen35",
    "qwen3_5_moe": "jaxkv.models.qwen3_5_moe:Qwen35Moe",
    "qwen3_moe": "jaxkv.models.qwen3_moe:Qwen3Moe",
    "qwen3_next": "jaxkv.models.qwen3_next:Qwen3Next",
}
# Models that also see pictures, and text parts saved by themselves: the family of the text part.
WRAPPED = {
    "gemma3": "gemma3_text",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
}
# Modules that belong to a family and are loaded as one is.
PARTS: dict[str, str] = {"draft_head": "jaxkv.models.draft_head:DraftHead"}


def check_supported(model_type: str, where: str) -> None:
    """Refuse a family that is not in the registry, naming those that are, and what they are the text part of."""
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES | WRAPPED))
        raise ModelError(f"{where}: model_type {model_type!r} is not supported; supported are: {known}")


def model_class(model_type: str) -> Any:
    """The module class of a family, or of a part of one."""
    if model_type not in PARTS:
        check_supported(model_type, "model")
    module, _, name = (FAMILIES | PARTS)[model_type].partition(":")
    return getattr(import_module(module), name)
