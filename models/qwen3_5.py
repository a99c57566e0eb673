"""The text part of the Qwen3.5 family (`model_type` qwen3_5), dense members of Qwen3.5 and Qwen3.6: Qwen3-Next with one plain feed-forward
part in every layer."""

from jaxkv.models.qwen3_next import Qwen3Next


class Qwen35(Qwen3Next):
    """Decoder-only hybrid of attention and recurrence."""
