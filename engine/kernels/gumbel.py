"""Keyed Gumbel noise in registers: the words of `sampling/noise`, four tokens a Philox call.

Which tokens get noise is left to `sampling`.
"""

import triton
import triton.language as tl

# The largest float32 below 1, as in `sampling/noise`.
BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
WORD_UNIT = tl.constexpr(2.0**-32)
BITS_OF_ONE = tl.constexpr(0x3F800000)
LN2_OF_MANTISSA = tl.constexpr(0.6931471805599453 * 2.0**-23)
# Far above the rounding of either side of the bound, far below what noise differs by.
BOUND_SLACK = tl.constexpr(1e-3)


@triton.jit
def uniforms(call_idx, stream, position, seed) -> tl.tensor:
    """Return [C, 4] float32 in (0, 1) for tokens 4 * call_idx [C] to 4 * call_idx + 3; position and seed are
    int64.
    """
    words = random_words(call_idx, stream, position, seed)
    return tl.minimum((words.to(tl.float32) + 0.5) * WORD_UNIT, BELOW_ONE)


@triton.jit
def random_words(call_idx, stream, position, seed) -> tl.tensor:
    """Return the uint32 words [C, 4] of `uniforms`."""
    first = call_idx.to(tl.uint32)
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    key_low, key_high = (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32)
    zero = first & 0
    w0, w1, w2, w3 = tl.random.philox_impl(first, zero + stream, zero + low, zero + high, key_low, key_high)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return words.reshape(call_idx.shape[0], 4)


@triton.jit
def gumbel(v) -> tl.tensor:
    """Return standard Gumbel noise -log(-log(1 - v)), finite for every v of `uniforms`."""
    u = 1.0 - v
    lost = 1.0 - u
    is_lost = lost == 0.0
    # log(u) * v / (1 - u) with u as rounded repairs the rounding of u (Goldberg 1991, theorem 4).
    exponential = tl.where(is_lost, v, -tl.log(u) * (v / tl.where(is_lost, 1.0, lost)))
    return -tl.log(exponential)


@triton.jit
def gumbel_bound(v) -> tl.tensor:
    """Return a number not below `gumbel`, and close to it for small v, without a logarithm.

    -log(1 - v) >= v, and log2(v) is at least its exponent plus its mantissa, which the bits of a float spell.
    """
    distance = BITS_OF_ONE - v.to(tl.int32, bitcast=True)
    return distance.to(tl.float32) * LN2_OF_MANTISSA + BOUND_SLACK
