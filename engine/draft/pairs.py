"""What the layers of a draft network read. Making it is left to the networks, and to kernels."""

from dataclasses import dataclass

from torch import Tensor

from engine.layers.rotary import Angles


@dataclass(frozen=True, slots=True)
class HeadInput:
    """T pairs: x [T, 2 * H], token and feature side by side; residual [T, H], the features or what stands
    for them; angles of the positions.
    """

    x: Tensor
    residual: Tensor
    angles: Angles
