"""Merging attention over disjoint key sets by their log-sum-exp. Computing the parts is left to the
backends.
"""

import torch
from torch import Tensor


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    """Return attention over the union of two key sets.

    out: [..., D]; lse: [...] float32, the log of the sum of exponentiated scores. With L = logaddexp(lse_a,
    lse_b), O = exp(lse_a - L) O_a + exp(lse_b - L) O_b. An empty side has lse -inf and weight exactly zero,
    whatever its out holds, so long as the other side is not empty too.
    """
    total = torch.logaddexp(lse_a, lse_b)
    weight_a = (lse_a - total).exp().unsqueeze(-1)
    weight_b = (lse_b - total).exp().unsqueeze(-1)
    return torch.where(weight_a > 0, weight_a * out_a, 0.0) + torch.where(weight_b > 0, weight_b * out_b, 0.0)
