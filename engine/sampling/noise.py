"""Noise as a pure function of (seed, absolute position, stream, token id), by Philox4x32-10.

How the noise becomes a token is left to `sampler`; no generator state exists anywhere.
"""

import enum

import torch
from torch import Tensor

# Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
_NUM_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD_MASK = 0xFFFFFFFF
_WORDS_PER_CALL = 4
# The largest float32 below 1: words above it would round up to 1, whose noise is infinite.
_BELOW_ONE = 1.0 - 2.0**-24


class Stream(enum.IntEnum):
    """Independent noise at one position: the target's draw, the draft's children, the acceptance tests, and
    acceptance replayed from a profile.
    """

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    REPLAY = 3


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four words of Philox4x32-10 for every counter and key; all are int64 in [0, 2**32).

    The arguments broadcast. Exact on every device: a product of two words wraps in int64, whose 64 bits are
    the right ones, and an arithmetic shift followed by a mask reads its upper word.
    """
    words = torch.broadcast_tensors(*counter, *key)  # type: ignore[no-untyped-call]
    c0, c1, c2, c3 = (word.clone(memory_format=torch.contiguous_format) for word in words[: len(counter)])
    rounds = torch.arange(_NUM_ROUNDS, device=c0.device)
    round_keys = (
        (word[..., None] + rounds * step & _WORD_MASK).unbind(-1)
        for word, step in zip(key, _KEY_STEPS, strict=True)
    )
    upper = torch.empty_like(c0)
    for k0, k1 in zip(*round_keys, strict=True):
        c0.mul_(_MULTIPLIERS[0])
        c2.mul_(_MULTIPLIERS[1])
        # c1 and c3 may carry dirty upper halves from the products: they are masked here before they multiply.
        torch.bitwise_right_shift(c2, 32, out=upper)
        c1.bitwise_xor_(upper).bitwise_xor_(k0).bitwise_and_(_WORD_MASK)
        torch.bitwise_right_shift(c0, 32, out=upper)
        c3.bitwise_xor_(upper).bitwise_xor_(k1).bitwise_and_(_WORD_MASK)
        c0, c1, c2, c3 = c1, c2, c3, c0
    return c0, c1.bitwise_and_(_WORD_MASK), c2, c3.bitwise_and_(_WORD_MASK)


def gumbel(seed: Tensor, position: Tensor, vocab_size: int, stream: Stream) -> Tensor:
    """Return standard Gumbel noise [B, V] float32, finite everywhere; seed and position are [B] int64.

    The noise of a token depends on nothing else, not on `vocab_size` either; its random word is the same on
    every device, its two logarithms are the device's own. With v a uniform of 32 bits,
    E = -log(1 - v) is exponential and -log(E) Gumbel: winners have a small v, where float32 is dense, so two
    leaders of a 128k vocabulary tie about once in 2**15 draws, not in every draw as 24-bit uniforms near 1.
    """
    noise = _words(seed, position, vocab_size, stream)
    noise.add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)
    return noise.neg_().log1p_().neg_().log_().neg_()


def uniform(seed: Tensor, position: Tensor, count: int, stream: Stream) -> Tensor:
    """Return `count` uniform numbers per row: [B, count] float32 in [0, 1), where 0 can occur.

    seed and position are [B] int64. Steps near 0 are 2**-32.
    """
    return _words(seed, position, count, stream).mul_(2.0**-32).clamp_(max=_BELOW_ONE)


def _words(seed: Tensor, position: Tensor, count: int, stream: Stream) -> Tensor:
    """Return random words 0 to count - 1 of every row, rounded to float32: [B, count], from 0 to 2**32."""
    num_calls = -(-count // _WORDS_PER_CALL)
    seed, position = seed[:, None], position[:, None]
    call_idx = torch.arange(num_calls, device=seed.device)
    low, high = position & _WORD_MASK, position >> 32 & _WORD_MASK
    counter = (call_idx, torch.full_like(position, stream), low, high)
    words = torch.empty(seed.shape[0], num_calls, _WORDS_PER_CALL, device=seed.device)
    for idx, word in enumerate(philox(counter, (seed & _WORD_MASK, seed >> 32 & _WORD_MASK))):
        words[..., idx].copy_(word)
    return words.flatten(1)[:, :count]
