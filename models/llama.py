"""The Llama family (`model_type` llama): SmolLM2, Llama 2 and 3, TinyLlama. The plain decoder, as it is."""

from jaxkv.models.decoder import Decoder


class Llama(Decoder):
    """Decoder-only transformer (https://arxiv.org/abs/2307.09288)."""
