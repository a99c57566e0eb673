"""Who guesses, by `speculate.kind`."""

from jaxkv.config import Config, num_draft
from jaxkv.speculate.small import SmallModel
from jaxkv.speculate.small_speculation import SmallSpeculation
from jaxkv.speculate.speculation import HeadSpeculation, NgramDrafter, Speculation


def make_speculation(config: Config, small: SmallModel | None) -> Speculation | None:
    """What the configuration asks for; `small` is the model of kind draft."""
    num_columns, rejects = 1 + num_draft(config), config.debug.reject_drafts
    if config.speculate.kind == "mtp":
        return HeadSpeculation(num_columns, config.pool.page_size, rejects=rejects)
    if small is not None:
        return SmallSpeculation(small, num_columns, small.chunk, rejects=rejects)
    return Speculation(NgramDrafter(), num_columns, rejects=rejects) if num_columns > 1 else None
