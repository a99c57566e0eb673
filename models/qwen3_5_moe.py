"""The text part of the Qwen3.5 family with experts (`model_type` qwen3_5_moe), as Qwen3.6-35B-A3B: Qwen3-Next in what it computes."""

from jaxkv.models.qwen3_next import Qwen3Next


class Qwen35Moe(Qwen3Next):
    """Decoder-only hybrid of attention and recurrence, with experts."""
