"""Floats as unsigned integers of the same order, for radix digits and integer maxima.

What is searched or drawn with them is left to the kernels beside this one.
"""

import triton
import triton.language as tl

# Keys of -inf and +inf; a NaN has the highest key of all.
KEY_BELOW_FINITE = tl.constexpr(0x007FFFFF)
KEY_ABOVE_FINITE = tl.constexpr(0xFF800000)
ID_BITS = tl.constexpr(31)
ID_MASK = tl.constexpr(0x7FFFFFFF)


@triton.jit
def ordered_key(x) -> tl.tensor:
    """Return the uint32 keys of x float32: they order as the numbers do, 0.0 and -0.0 are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    key = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(x != x, 0xFFFFFFFF, key).to(tl.uint32)


@triton.jit
def number_of_key(key, SHIFT: tl.constexpr = 0) -> tl.tensor:
    """Return the float32 whose key this uint32 is, or whose key >> SHIFT it is where its low bits are
    zero.
    """
    key <<= SHIFT
    bits = tl.where(key >> 31 != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF).to(tl.uint32)
    # Below zero the low bits of a key are inverted too.
    return (bits >> SHIFT << SHIFT).to(tl.float32, bitcast=True)


@triton.jit
def is_finite_key(key) -> tl.tensor:
    """Return whether the number of this key is neither infinite nor NaN."""
    return (key > KEY_BELOW_FINITE) & (key < KEY_ABOVE_FINITE)


@triton.jit
def pack_key_and_id(key, token_id) -> tl.tensor:
    """Return a positive int64 whose maximum is the highest key with the lowest id; 0 is below all of them."""
    return key.to(tl.int64) << ID_BITS | (token_id ^ ID_MASK).to(tl.int64)


@triton.jit
def key_of_packed(packed) -> tl.tensor:
    """Return the uint32 key of a packed pair."""
    return (packed >> ID_BITS).to(tl.uint32)


@triton.jit
def id_of_packed(packed) -> tl.tensor:
    """Return the int64 id of a packed pair."""
    return (packed & ID_MASK) ^ ID_MASK
