"""The one rule of what may be stored as K/V. Where it is stored is left to `kv_pool` and `tree_scratch`."""

from torch import Tensor


def finite(x: Tensor) -> Tensor:
    """Return x with zeros for NaN and infinities.

    A masked key, of a reused block or of another branch of a tree, still enters the matrix products of
    attention, where neither a weight of zero nor the largest bias silences NaN, nor a huge number put in its
    place.
    """
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
