"""The elementwise work between matrix products, behind one protocol, and its torch implementation.

Which implementation a network runs is left to the runner; a GPU's fused kernels are in `triton_ops`.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kvcache.finite import finite
from engine.layers.rotary import Angles, angles_of, rotate_qkv

FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max


class LayerOps(Protocol):
    """What a layer does besides its products, rounded where torch does, but that a residual [T, H] may have
    what rounding left of it behind: [T, 2 * H].
    """

    def embed(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, table: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Angles]:
        """Return (`norm` of the embedded tokens [T, H], these as a residual, and their angles).

        token_ids, positions: [T] int64, where an id below 0 reads row 0; rows: [V, H]; table: `Rotary`'s.
        """

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x [T, H] scaled to unit root mean square, times weight [H]; rounded once."""

    def add_norm(self, delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (`norm` of the new residual [T, H], the new residual residual + delta)."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, [T, I], of gate_up [T, 2 * I]."""

    def rope_store(
        self,
        qkv: Tensor,
        angles: Angles,
        k_dest: Tensor,
        v_dest: Tensor,
        dest_idx: Tensor | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Turn the heads of qkv [T, Hq + 2 * Hkv, D], keep K and V, and return q [T, Hq, D].

        Turned keys and values go to k_dest, v_dest [M, Hkv, D] at rows dest_idx [T] int64 (None: token t to
        row t), made `finite`. Destinations in float8_e4m3fn hold value / scale, clamped, where `scales` are
        those of K and of V, [Hkv] float32. May turn q in place: qkv is used up, and q need not be contiguous.
        """


class TorchOps:
    """Plain torch on any device; differentiable, but for what `rope_store` keeps."""

    def embed(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, table: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Angles]:
        embedded = F.embedding(token_ids.clamp(min=0), rows)
        return self.norm(embedded, weight, eps), embedded, angles_of(table, positions)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # The same sums as `F.rms_norm` bit for bit, in half the operations: at a token the operations cost.
        x32 = x.float()
        scale = (x32 * x32).sum(-1, keepdim=True).mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
        return (x32 * scale * weight).to(x.dtype)

    def add_norm(self, delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual = residual + delta
        return self.norm(residual, weight, eps), residual

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rope_store(
        self,
        qkv: Tensor,
        angles: Angles,
        k_dest: Tensor,
        v_dest: Tensor,
        dest_idx: Tensor | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        q, k, v = rotate_qkv(qkv, angles, k_dest.shape[1])
        k_scale, v_scale = scales or (None, None)
        for dest, x, scale in ((k_dest, k, k_scale), (v_dest, v, v_scale)):
            rows = _as_stored(x, dest.dtype, scale)
            if dest_idx is None:
                dest[: x.shape[0]] = rows
            else:
                _bytes(dest).index_copy_(0, dest_idx, _bytes(rows))
        return q


def _as_stored(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Return x [T, Hkv, D] as pages of `dtype` hold it; scale [Hkv] or None."""
    if dtype != torch.float8_e4m3fn:
        return finite(x.to(dtype))
    x = finite(x).float()
    if scale is not None:
        x = x * (1 / scale)[:, None]
    # The conversion turns what is out of range into NaN rather than the largest number.
    return x.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(dtype)


def _bytes(x: Tensor) -> Tensor:
    """Return float8 rows as bytes, which indexing knows; other rows as they are."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
