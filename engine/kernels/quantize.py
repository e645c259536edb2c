"""Tokens in float8 with a scale each, in one launch.

The product they enter is left to `layers/fp8_linear`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_FLOAT8_MAX = tl.constexpr(448.0)
_TINY = tl.constexpr(1.1754943508222875e-38)


def quantize_rows(x: Tensor, *, overlap: bool = False) -> tuple[Tensor, Tensor]:
    """Return (rows [T, K] float8_e4m3fn, scale [T, 1] float32) of x [T, K]: see `fp8_linear.quantize_rows`.

    `overlap`: see `norm.rms_norm`.
    """
    num_tokens, size = x.shape
    assert x.stride(1) == 1, f"rows must be contiguous, found strides {x.stride()}"
    rows = torch.empty(num_tokens, size, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(num_tokens, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    _quantize_rows_kernel[(num_tokens,)](
        x,
        rows,
        scale,
        x.stride(0),
        size,
        BLOCK=block,
        OVERLAP=overlap,
        num_warps=min(max(block // 512, 4), 32),
        launch_pdl=overlap,
    )
    return rows, scale


@triton.jit
def _quantize_rows_kernel(
    x_ptr, rows_ptr, scale_ptr, x_stride, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_column = column < size
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * x_stride + column, mask=is_column, other=0.0).to(tl.float32)
    # A maximum skips NaN; the sum is 0, or NaN where a number is not finite.
    largest = tl.max(tl.abs(x), 0) + tl.sum(x * 0.0, 0)
    scale = tl.where(largest < _TINY * _FLOAT8_MAX, _TINY, tl.div_rn(largest, _FLOAT8_MAX))
    tl.store(scale_ptr + row, scale)
    scaled = tl.minimum(tl.maximum(tl.div_rn(x, scale), -_FLOAT8_MAX), _FLOAT8_MAX)
    tl.store(rows_ptr + row * size + column, scaled.to(tl.float8e4nv), mask=is_column)
