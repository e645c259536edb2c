"""The weight of a root-mean-square normalisation. The arithmetic is left to `ops`, which fuses it."""

import torch
from torch import nn


class RMSNorm(nn.Module):
    """A learnt weight [size] and the epsilon under the root; `LayerOps` applies them, there is no forward."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
