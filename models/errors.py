"""The one error of this package. Knows nothing else."""


class ModelError(Exception):
    """A checkpoint, tokenizer or template that a user must change; the message says what happened and what to do."""
