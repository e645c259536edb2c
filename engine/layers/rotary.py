"""Rotary position embedding: the angle table of a config, and the rotation of heads by it.

Choosing the positions of tokens is left to the caller.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.config import RopeScaling

Angles = tuple[Tensor, Tensor]  # (cos, sin), each [T, 1, head_dim]: see `Rotary`


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Return the angle per position of each pair of dimensions, [head_dim / 2] float64.

    "linear" divides every frequency by `factor`. "llama3" divides only the slow ones, with a ramp between the
    wavelengths original_max_position / high_freq_factor and original_max_position / low_freq_factor.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    inv_freq = theta**-exponents
    if scaling is None:
        return inv_freq
    if scaling.kind == "linear":
        return inv_freq / scaling.factor
    wavelengths = 2 * math.pi / inv_freq
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((scaling.original_max_position / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return inv_freq * (keep + (1 - keep) / scaling.factor)


class Rotary(nn.Module):
    """The cosine and sine of every position up to `num_positions`, in the half-split layout of Hugging Face
    Llama.
    """

    def __init__(
        self, head_dim: int, theta: float, scaling: RopeScaling | None, num_positions: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        positions = torch.arange(num_positions, dtype=torch.float64)
        angles = positions[:, None] * inverse_frequencies(head_dim, theta, scaling)
        cos, sin = angles.cos(), angles.sin()
        # The first half meets -sin and the second +sin, so that a rotation is x * cos + swap(x) * sin.
        table = torch.cat((cos, cos, -sin, sin), -1).to(dtype)
        self.register_buffer("table", table, persistent=False)
        self.table: Tensor  # [num_positions, 2 * head_dim]

    def forward(self, positions: Tensor) -> Angles:
        """Return (cos, sin), each [T, 1, head_dim], of `positions` [T] int64."""
        return angles_of(self.table, positions)


def angles_of(table: Tensor, positions: Tensor) -> Angles:
    """Return (cos, sin) of `positions` [T] int64 from the table of a `Rotary`."""
    cos, sin = F.embedding(positions, table).unsqueeze(1).chunk(2, dim=-1)
    return cos, sin


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Return x [T, heads, head_dim] turned by `angles`."""
    cos, sin = angles
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def rotate_qkv(qkv: Tensor, angles: Angles, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [T, Hq, D] and k [T, Hkv, D], turned, and v [T, Hkv, D] of qkv [T, Hq + 2 * Hkv, D]."""
    num_rotated = qkv.shape[1] - num_kv_heads
    rotated = rotate(qkv[:, :num_rotated], angles)
    num_heads = num_rotated - num_kv_heads
    return rotated[:, :num_heads], rotated[:, num_heads:], qkv[:, num_rotated:]
