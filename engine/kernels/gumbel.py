"""Keyed Gumbel noise in registers: the words of `sampling/noise`, four tokens a Philox call.

Which tokens get noise is left to `sampling`.
"""

import triton
import triton.language as tl

# The largest float32 below 1, as in `sampling/noise`.
BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
WORD_UNIT = tl.constexpr(2.0**-32)


@triton.jit
def random_words(call_idx, stream, position, seed):
    """Return four uint32 words for tokens 4 * call_idx to 4 * call_idx + 3; position and seed are int64."""
    zero = call_idx.to(tl.uint32) & 0
    low, high = zero + (position & 0xFFFFFFFF).to(tl.uint32), zero + (position >> 32).to(tl.uint32)
    key_low, key_high = (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32)
    return tl.random.philox_impl(call_idx.to(tl.uint32), zero + stream, low, high, key_low, key_high)


@triton.jit
def gumbel_of_word(word):
    """Return the standard Gumbel number of a uint32 word, finite for each."""
    v = tl.minimum((word.to(tl.float32) + 0.5) * WORD_UNIT, BELOW_ONE)
    return -tl.log(_exponential(v))


@triton.jit
def _exponential(v):
    """Return -log(1 - v), exact to rounding for v in (0, 1).

    log(u) * v / (1 - u) with u = 1 - v as rounded repairs that rounding (Goldberg 1991, theorem 4).
    """
    u = 1.0 - v
    lost = 1.0 - u
    return tl.where(lost == 0.0, v, -tl.log(u) * (v / tl.where(lost == 0.0, 1.0, lost)))
