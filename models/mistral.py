"""The Mistral family (`model_type` mistral). The plain decoder; in early ones every layer sees only the last `sliding_window` tokens."""

from jaxkv.models.decoder import Decoder


class Mistral(Decoder):
    """Decoder-only transformer (https://arxiv.org/abs/2310.06825); the window is in the config."""
