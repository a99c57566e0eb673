"""Sets of tokens as bits, 32 in a word: token 70 is bit 6 of word 2. Knows nothing of what a token says."""

import numpy as np

MASK_BITS = 32


def mask_width(vocab_size: int) -> int:
    """Words of a mask over the vocabulary."""
    return -(-vocab_size // MASK_BITS)


def all_tokens(vocab_size: int) -> np.ndarray:
    """Every token, and no bit beyond them."""
    mask = np.full(mask_width(vocab_size), 0xFFFFFFFF, np.uint32)
    forbid(mask, np.arange(vocab_size, len(mask) * MASK_BITS))
    return mask


def forbid(mask: np.ndarray, ids: np.ndarray) -> None:
    """Clear the bits of tokens."""
    np.bitwise_and.at(mask, ids // MASK_BITS, ~(np.uint32(1) << (ids % MASK_BITS).astype(np.uint32)))


def allow(mask: np.ndarray, ids: np.ndarray) -> None:
    """Set the bits of tokens."""
    np.bitwise_or.at(mask, ids // MASK_BITS, np.uint32(1) << (ids % MASK_BITS).astype(np.uint32))


def is_allowed(mask: np.ndarray, token_id: int) -> bool:
    """Whether a token's bit is set."""
    return bool(mask[token_id // MASK_BITS] >> np.uint32(token_id % MASK_BITS) & 1)
