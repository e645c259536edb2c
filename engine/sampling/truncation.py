"""Which tokens top-k, top-p and min-p keep, found by an exact threshold search instead of a sort.

Writing the mask into logits is left to `warp`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.speculation import SamplingTensors

# Probabilities become integers of 2**-44 of the largest: their sums are exact in any order, on any device and
# in any batch, and 2**18 tokens still fit in int64.
_WEIGHT_UNIT = 2.0**44
_UNBOUNDED = 2**63 - 1
_KEY_BITS = 32
_MAX_DIGIT_BITS = 11


def truncation_mask(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Return [B, V] bool, True where a token may be drawn; logits are [B, V] float32 after penalties.

    All three rules read softmax(logits / temperature) and one total order: logit falling, then id rising.
    Top-k keeps the first k; top-p keeps, of those, the smallest leading set whose share of their mass reaches
    top_p; min-p keeps what is at least min_p times as probable as the best token, which is always kept. Rows
    of temperature 0 keep everything, for their argmax survives any rule, and so do rows whose largest logit
    is not finite, for their fault must stay visible.
    """
    temperature = sampling.temperature[:, None]
    peak = logits.amax(-1, keepdim=True)
    is_open = (temperature == 0) | ~peak.isfinite()
    ratio = (logits - peak).div_(temperature.masked_fill(temperature == 0, 1.0)).exp_()
    levels = tuple(_radix_levels(logits))
    kept = _leading(levels, torch.ones_like(levels[0].digit), sampling.top_k[:, None])
    weights = ratio.mul(_WEIGHT_UNIT).long().masked_fill_(~kept, 0)
    top_p = sampling.top_p[:, None]
    budget = top_p.double().mul_(weights.sum(-1, keepdim=True)).ceil_().long()
    kept &= _leading(levels, weights, budget.masked_fill_(top_p >= 1, _UNBOUNDED))
    kept &= ratio >= sampling.min_p[:, None]
    return kept | is_open


@dataclass(frozen=True, slots=True)
class _RadixLevel:
    """One digit of every sort key: prefix [B, V] int32 holds the key down to this digit, digit [B, V] int64
    is counted from `lowest`, and takes at most `num_values` values.
    """

    prefix: Tensor
    digit: Tensor
    lowest: int
    num_values: int


def _radix_levels(logits: Tensor) -> Iterator[_RadixLevel]:
    """Yield the digits of the sort keys, highest first.

    The key of a float32 is its bits, with all but the sign flipped below zero: int32 that order as the
    numbers do. No digit has many more values than the vocabulary has tokens.
    """
    # Adding 0 turns -0.0, whose bits would rank below, into 0.0.
    bits = logits.add(0.0).view(torch.int32)
    keys = bits ^ (bits >> 31 & torch.iinfo(torch.int32).max)
    digit_bits = min(_MAX_DIGIT_BITS, max(4, logits.shape[-1].bit_length()))
    shift = _KEY_BITS
    while shift > 0:
        is_highest = shift == _KEY_BITS
        num_values = 1 << min(digit_bits, shift)
        shift = max(0, shift - digit_bits)
        prefix = keys >> shift
        # Only the highest digit is signed.
        digit = prefix + num_values // 2 if is_highest else prefix & num_values - 1
        yield _RadixLevel(prefix, digit.long(), -(num_values // 2) if is_highest else 0, num_values)


def _leading(levels: tuple[_RadixLevel, ...], weights: Tensor, budget: Tensor) -> Tensor:
    """Return [B, V] bool: is the weight of all tokens ahead of this one less than `budget` [B, 1]?

    A radix search for the key where the budget runs out. Tokens of equal keys must have equal weights; they
    run by id. `weights` [B, V] int64 is overwritten.
    """
    ahead = torch.zeros_like(budget)
    threshold = torch.zeros_like(budget)
    for level in levels:
        mass = weights.new_zeros(weights.shape[0], level.num_values).scatter_add_(1, level.digit, weights)
        mass_ahead = mass.flip(-1).cumsum(-1).flip(-1).sub_(mass).add_(ahead)
        # Non-increasing along the values, so the number that overrun the budget is the lowest that does not.
        # Rows that are not finite carry garbage here: the clamp keeps their index legal.
        chosen = (mass_ahead >= budget).sum(-1, keepdim=True).clamp_(max=level.num_values - 1)
        ahead = mass_ahead.gather(1, chosen)
        threshold = threshold * level.num_values + (chosen + level.lowest)
        weights.masked_fill_(level.prefix != threshold.int(), 0)
    keys = levels[-1].prefix
    ahead_of_tied = weights.cumsum(-1).sub_(weights).add_(ahead)
    return (keys > threshold.int()) | ((keys == threshold.int()) & (ahead_of_tied < budget))
