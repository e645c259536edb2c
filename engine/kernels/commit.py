"""Moving accepted K/V rows of every layer from a scratch into pages, in one launch.

Which rows go where is left to the caller; rows are finite and in the pages' dtype already.
"""

import triton
import triton.language as tl
from torch import Tensor


def commit_rows(
    k_scratch: Tensor, v_scratch: Tensor, src: Tensor | None, k_pages: Tensor, v_pages: Tensor, dest: Tensor
) -> None:
    """Copy row src[r] (None: row r) of k_scratch, v_scratch [L, M, Hkv, D] to slot dest[r] of k_pages,
    v_pages [L, S, Hkv, D], for every layer; src, dest: [R] int64. Slot 0, of the dummy block, is left alone.
    """
    num_layers, _, num_kv_heads, head_dim = k_pages.shape
    size = num_kv_heads * head_dim
    for x in (k_scratch, v_scratch, k_pages, v_pages):
        assert x.stride()[1:] == (size, head_dim, 1), f"rows must be contiguous, found strides {x.stride()}"
    assert k_scratch.stride(0) == v_scratch.stride(0), (k_scratch.stride(), v_scratch.stride())
    assert k_pages.stride(0) == v_pages.stride(0), (k_pages.stride(), v_pages.stride())
    block = triton.next_power_of_2(size)
    _commit_rows_kernel[(dest.shape[0], num_layers)](
        k_scratch,
        v_scratch,
        src,
        k_pages,
        v_pages,
        dest,
        k_scratch.stride(0),
        k_pages.stride(0),
        size,
        BLOCK=block,
        num_warps=min(max(block // 256, 1), 8),
    )


@triton.jit
def _commit_rows_kernel(
    k_scratch_ptr,
    v_scratch_ptr,
    src_ptr,
    k_pages_ptr,
    v_pages_ptr,
    dest_ptr,
    scratch_stride,
    pages_stride,
    size,
    BLOCK: tl.constexpr,
):
    row, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(dest_ptr + row)
    source_row = row.to(tl.int64)
    if src_ptr is not None:
        source_row = tl.load(src_ptr + row)
    source = layer * scratch_stride + source_row * size
    target = layer * pages_stride + slot * size
    column = tl.arange(0, BLOCK)
    mask = (column < size) & (slot != 0)
    k = tl.load(k_scratch_ptr + source + column, mask=mask)
    v = tl.load(v_scratch_ptr + source + column, mask=mask)
    tl.store(k_pages_ptr + target + column, k, mask=mask)
    tl.store(v_pages_ptr + target + column, v, mask=mask)
