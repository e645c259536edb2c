"""Linear layers with weights of four bits, scaled in groups, through torch's own int4 product.

Fit for layers whose time is that of reading their weight; which those are is left to `quantize`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import ConfigError

GROUP_SIZES = (128, 64)  # inputs that share a scale: the first size that divides a weight's
# Up to so many tokens the product of four bits is faster; it decodes its weight anew for every 16 tokens.
MAX_TOKENS = 16
_ZERO = 8  # a weight is (q - 8) * scale + zero, q in 0 .. 15


def quantize_groups(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return (q [out, in] int32 in 0 .. 15, scales and zeros [in / group_size, out, 2] bfloat16) of W
    [out, in].

    Each group of inputs spans its own smallest to largest weight. Levels are chosen for the rounded scale and
    zero.
    """
    groups = weight.detach().float().view(weight.shape[0], -1, group_size)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-8).bfloat16().float()
    zero = (low + _ZERO * scale).bfloat16().float()
    q = ((groups - zero) / scale + _ZERO).round().clamp(0, 15).to(torch.int32)
    scale_and_zero = torch.cat((scale, zero), -1).transpose(0, 1).contiguous()
    return q.flatten(1), scale_and_zero.bfloat16()


def dequantize_groups(q: Tensor, scale_and_zero: Tensor) -> Tensor:
    """Return the weight [out, in] float32 that `quantize_groups` has stored."""
    scale, zero = scale_and_zero.float().transpose(0, 1).unsqueeze(2).unbind(-1)
    weight: Tensor = (q.view(*scale.shape[:2], -1) - _ZERO) * scale + zero
    return weight.flatten(1)


class Int4Linear(nn.Module):
    """y = x W^T + b with W [out, in] in four bits, in bfloat16 elsewhere; neither trained nor saved.

    The plain weight stays, and serves passes of more than `MAX_TOKENS` tokens.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        out_size, in_size = weight.shape
        if out_size % 16 or in_size % GROUP_SIZES[-1] or weight.dtype is not torch.bfloat16:
            raise ConfigError(
                f"four-bit layers need bfloat16 weights of [a multiple of 16, a multiple of "
                f"{GROUP_SIZES[-1]}], found {tuple(weight.shape)} {weight.dtype}: leave these as they are"
            )
        self._group_size = next(size for size in GROUP_SIZES if in_size % size == 0)
        q, self._scale_and_zero = quantize_groups(weight, self._group_size)
        self._packed = _pack(q, self._group_size // 16)
        self._weight = weight.detach()
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, out] for x [T, in] bfloat16."""
        if x.shape[0] > MAX_TOKENS:
            return F.linear(x, self._weight, self._bias)
        name = "_weight_int4pack_mm" if x.is_cuda else "_weight_int4pack_mm_for_cpu"
        y: Tensor = getattr(torch.ops.aten, name)(x, self._packed, self._group_size, self._scale_and_zero)
        return y if self._bias is None else y + self._bias


def _pack(q: Tensor, inner_k_tiles: int) -> Tensor:
    """Return q [out, in] in the order that the int4 product of its device reads."""
    if q.is_cuda:
        pairs = (q[:, ::2] << 4 | q[:, 1::2]).to(torch.uint8)
        packed: Tensor = torch.ops.aten._convert_weight_to_int4pack(pairs, inner_k_tiles)  # noqa: SLF001
    else:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, inner_k_tiles)  # noqa: SLF001
    return packed
