"""Packed token masks on the device: what a grammar forbids becomes -inf among logits.

Which tokens those are is left to `matcher`.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def mask_width(vocab_size: int) -> int:
    """Return the number of 32-bit words that hold a bit for every token."""
    return -(-vocab_size // 32)


def pack(token_ids: Iterable[int], vocab_size: int) -> Tensor:
    """Return a mask [W] int32 with the bits of `token_ids`."""
    words = [0] * mask_width(vocab_size)
    for token_id in token_ids:
        words[token_id // 32] |= 1 << token_id % 32
    return torch.tensor([word - (1 << 32) if word >> 31 else word for word in words], dtype=torch.int32)


class TokenBits:
    """Unpacks masks on one device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        # By table: shifting each word 32 times would cost as many passes over the vocabulary.
        bytes_ = torch.arange(256, device=device)
        self._table = (bytes_[:, None] >> torch.arange(8, device=device) & 1).bool()

    def unpack(self, masks: Tensor) -> Tensor:
        """Return [P, V] bool, True where masks [P, W] int32 have the token's bit."""
        if self._table.is_cuda:
            masks = masks.pin_memory()  # only then is the copy behind the target's pass, and not after it
        bytes_ = masks.to(self._table.device, non_blocking=True).view(torch.uint8)
        return self._table[bytes_.int()].flatten(1)[:, : self._vocab_size]


def forbid(logits: Tensor, rows: Tensor, is_allowed: Tensor) -> None:
    """Write -inf into rows [P] int64 of logits [T, V] where is_allowed [P, V] bool is False."""
    logits[rows] = logits[rows].masked_fill_(~is_allowed, -math.inf)
