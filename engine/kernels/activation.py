"""The gate of the MLP in one pass. Choosing this kernel is left to `layers/triton_ops`."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def silu_mul(gate_up: Tensor, *, overlap: bool = False) -> Tensor:
    """Return silu(gate) * up, [T, I], of contiguous gate_up [T, 2 * I]; silu is rounded before the product,
    as torch's is. `overlap`: see `norm.rms_norm`.
    """
    assert gate_up.is_contiguous(), gate_up.stride()
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, size)
    _silu_mul_kernel[(num_tokens, triton.cdiv(size, _BLOCK))](
        gate_up, out, size, BLOCK=_BLOCK, OVERLAP=overlap, num_warps=4, launch_pdl=overlap
    )
    return out


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < size
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    gate = tl.load(gate_up_ptr + row * 2 * size + column, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * size + size + column, mask=is_column, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * size + column, (silu * up).to(dtype), mask=is_column)
