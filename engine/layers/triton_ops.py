"""`LayerOps` on a CUDA device: one launch each. The kernels are in `engine/kernels`."""

from torch import Tensor

from engine.kernels.activation import silu_mul
from engine.kernels.embed import embed_rms_norm
from engine.kernels.norm import add_rms_norm, rms_norm
from engine.kernels.rope import rope_store
from engine.layers.rotary import Angles


class TritonOps:
    """Fused kernels, all of them fit for capture.

    `overlap` lets a launch begin before the kernel ahead of it has ended (compute capability 9 and up).
    """

    def __init__(self, *, overlap: bool) -> None:
        self._overlap = overlap

    def embed(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, table: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Angles]:
        normed, embedded, angles = embed_rms_norm(token_ids, positions, rows, table, weight, eps)
        cos, sin = angles.unsqueeze(1).chunk(2, dim=-1)
        return normed, embedded, (cos, sin)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps, overlap=self._overlap)

    def add_norm(self, delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(delta, residual, weight, eps, overlap=self._overlap)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up, overlap=self._overlap)

    def rope_store(
        self,
        qkv: Tensor,
        angles: Angles,
        k_dest: Tensor,
        v_dest: Tensor,
        dest_idx: Tensor | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """See `LayerOps`; turns q in place, as a view of qkv."""
        return rope_store(qkv, *angles, k_dest, v_dest, dest_idx, scales, overlap=self._overlap)
