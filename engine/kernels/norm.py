"""Root-mean-square normalisation with its neighbours: one program per token, the row in registers.

Numbers are rounded where torch's fused norm rounds them: float32 inside, once at the end. Choosing these
kernels is left to `layers/triton_ops`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, overlap: bool = False) -> Tensor:
    """Return x [T, H] scaled to unit root mean square, times weight [H].

    With `overlap` (compute capability 9 and up) the launch does not wait for the kernel before it: the weight
    is read meanwhile, x only after. So no kernel right before may be one that writes the weight.
    """
    num_tokens, size = x.shape
    out = x.new_empty(num_tokens, size)
    block = triton.next_power_of_2(size)
    _rms_norm_kernel[(num_tokens,)](
        _rows(x),
        weight,
        out,
        x.stride(0),
        size,
        eps,
        BLOCK=block,
        OVERLAP=overlap,
        num_warps=warps_of_row(block),
        launch_pdl=overlap,
    )
    return out


def add_rms_norm(
    delta: Tensor, residual: Tensor, weight: Tensor, eps: float, *, overlap: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (normed [T, H], total): total = residual + delta [T, H], rounded, and its `rms_norm`.

    A residual is [T, H], or [T, 2 * H] with what rounding left of its first half in the second; so is the
    total then. Twice the digits are kept, and loads and stores stay as wide as those of delta.
    """
    num_tokens, size = delta.shape
    total, normed = torch.empty_like(residual, memory_format=torch.contiguous_format), torch.empty_like(delta)
    block = triton.next_power_of_2(size)
    _add_rms_norm_kernel[(num_tokens,)](
        _rows(delta),
        _rows(residual),
        weight,
        normed,
        total,
        delta.stride(0),
        residual.stride(0),
        size,
        eps,
        BLOCK=block,
        IS_SPLIT=residual.shape[1] == 2 * size,
        OVERLAP=overlap,
        num_warps=warps_of_row(block),
        launch_pdl=overlap,
    )
    return normed, total


def _rows(x: Tensor) -> Tensor:
    assert x.stride(-1) == 1, f"rows must be contiguous, found strides {x.stride()}"
    return x


def warps_of_row(block: int) -> int:
    """Return the warps that keep a row in few registers: 16 elements a lane, where the chip has so many."""
    return min(max(block // 512, 4), 16)


@triton.jit
def scaled(x, weight, size, eps) -> tl.tensor:
    """Return the norm of x [BLOCK] float32, zero beyond `size`."""
    return x * tl.rsqrt(tl.sum(x * x, 0) / size + eps) * weight


@triton.jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, x_stride, size, eps, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_column = column < size
    weight = tl.load(weight_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * x_stride + column, mask=is_column, other=0.0).to(tl.float32)
    normed = scaled(x, weight, size, eps)
    tl.store(out_ptr + row * size + column, normed.to(out_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def _add_rms_norm_kernel(
    delta_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    total_ptr,
    delta_stride,
    residual_stride,
    size,
    eps,
    BLOCK: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_column = column < size
    weight = tl.load(weight_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    delta = tl.load(delta_ptr + row * delta_stride + column, mask=is_column, other=0.0).to(tl.float32)
    residual = residual_ptr + row * residual_stride + column
    total = tl.load(residual, mask=is_column, other=0.0).to(tl.float32) + delta
    out = total_ptr + row * (2 * size if IS_SPLIT else size) + column
    if IS_SPLIT:
        total += tl.load(residual + size, mask=is_column, other=0.0).to(tl.float32)
    rounded = total.to(total_ptr.dtype.element_ty)
    tl.store(out, rounded, mask=is_column)
    if IS_SPLIT:
        rest = (total - rounded.to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(out + size, rest, mask=is_column)
    else:
        total = rounded.to(tl.float32)
    normed = scaled(total, weight, size, eps)
    tl.store(normed_ptr + row * size + column, normed.to(normed_ptr.dtype.element_ty), mask=is_column)
