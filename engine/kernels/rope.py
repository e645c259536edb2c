"""Rotary embedding of queries and keys, and the store of keys and values, in one launch.

Where tokens go is left to the caller; the arithmetic and its rounding are those of `layers/ops.TorchOps`.
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK_HEADS = 16
# Up to so many tokens the kernel behind, attention, may be put in place meanwhile, which took 2.7% off a step
# of one row; with more tokens its programs are in the way.
_MOST_LEADING_TOKENS = 16
_FLOAT8_MAX = tl.constexpr(448.0)


def rope_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_dest: Tensor,
    v_dest: Tensor,
    dest_idx: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    *,
    overlap: bool = False,
) -> Tensor:
    """Turn queries in place, write turned keys and values to their rows; return q, a view [T, Hq, D] of qkv.

    qkv: [T, Hq + 2 * Hkv, D]; cos, sin: [T, 1, D], with -sin in the first half; k_dest, v_dest: [M, Hkv, D]
    of one dtype, written at rows dest_idx [T] int64, or t. What is not finite becomes 0. scales: those of K
    and V, [Hkv] float32, for float8 destinations. `overlap`: see `norm.rms_norm`.
    """
    num_tokens, num_all_heads, head_dim = qkv.shape
    num_kv_heads = k_dest.shape[1]
    for x in (qkv, k_dest, v_dest):
        assert x.stride()[1:] == (head_dim, 1), f"heads must be contiguous, found strides {x.stride()}"
    assert cos.stride(0) == sin.stride(0), (cos.stride(), sin.stride())
    # Arguments that are not read are given any pointer.
    k_scale, v_scale = scales or (qkv, qkv)
    _rope_store_kernel[(num_tokens, triton.cdiv(num_all_heads, _BLOCK_HEADS))](
        qkv,
        cos,
        sin,
        k_dest,
        v_dest,
        qkv if dest_idx is None else dest_idx,
        k_scale,
        v_scale,
        qkv.stride(0),
        cos.stride(0),
        k_dest.stride(0),
        v_dest.stride(0),
        num_all_heads - 2 * num_kv_heads,
        num_kv_heads,
        head_dim // 2,
        BLOCK_HEADS=_BLOCK_HEADS,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        HAS_IDX=dest_idx is not None,
        HAS_SCALES=scales is not None,
        OVERLAP=overlap,
        IS_LEADING=overlap and num_tokens <= _MOST_LEADING_TOKENS,
        num_warps=4,
        launch_pdl=overlap,
    )
    return qkv[:, : num_all_heads - 2 * num_kv_heads]


@triton.jit
def _kept(x, scale_ptr, head, is_head, dtype: tl.constexpr, HAS_SCALES: tl.constexpr):
    """Return x [heads, half] as rows of `dtype` hold it."""
    if dtype == tl.float8e4nv:
        x = x.to(tl.float32)
        x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
        if HAS_SCALES:
            scale = tl.load(scale_ptr + head, mask=is_head, other=1.0)
            x = x * tl.div_rn(1.0, scale)[:, None]
        return tl.minimum(tl.maximum(x, -_FLOAT8_MAX), _FLOAT8_MAX).to(dtype)
    x = x.to(dtype)
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(dtype)


@triton.jit
def _store_halves(
    dest_ptr, first, second, scale_ptr, head, pair, half, mask, is_head, HAS_SCALES: tl.constexpr
):
    """Store both halves of the heads [heads, half] in one row of K or V."""
    dtype = dest_ptr.dtype.element_ty
    at = dest_ptr + head[:, None] * (2 * half) + pair[None, :]
    tl.store(at, _kept(first, scale_ptr, head, is_head, dtype, HAS_SCALES), mask=mask)
    tl.store(at + half, _kept(second, scale_ptr, head, is_head, dtype, HAS_SCALES), mask=mask)


@triton.jit
def _rope_store_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    k_ptr,
    v_ptr,
    dest_idx_ptr,
    k_scale_ptr,
    v_scale_ptr,
    token_stride,
    angle_stride,
    k_stride,
    v_stride,
    num_heads,
    num_kv_heads,
    half,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HAS_IDX: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    OVERLAP: tl.constexpr,
    IS_LEADING: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    pair = tl.arange(0, BLOCK_HALF)
    is_pair = pair < half
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        if IS_LEADING:
            tl.extra.cuda.gdc_launch_dependents()
    cos = tl.load(cos_ptr + token * angle_stride + pair, mask=is_pair, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * angle_stride + half + pair, mask=is_pair, other=0.0).to(tl.float32)
    mask = (head < num_heads + 2 * num_kv_heads)[:, None] & is_pair[None, :]
    at = qkv_ptr + token * token_stride + head[:, None] * (2 * half) + pair[None, :]
    first = tl.load(at, mask=mask, other=0.0)
    second = tl.load(at + half, mask=mask, other=0.0)
    turned_first, turned_second = _turn(first, second, cos[None, :], sin[None, :])

    is_query = mask & (head < num_heads)[:, None]
    tl.store(at, turned_first, mask=is_query)
    tl.store(at + half, turned_second, mask=is_query)

    row = token
    if HAS_IDX:
        row = tl.load(dest_idx_ptr + token)
    k_head = head - num_heads
    is_k_head = (k_head >= 0) & (k_head < num_kv_heads)
    is_key = mask & is_k_head[:, None]
    keys = k_ptr + row * k_stride
    _store_halves(
        keys, turned_first, turned_second, k_scale_ptr, k_head, pair, half, is_key, is_k_head, HAS_SCALES
    )
    v_head = k_head - num_kv_heads
    is_v_head = (v_head >= 0) & (v_head < num_kv_heads)
    is_value = mask & is_v_head[:, None]
    values = v_ptr + row * v_stride
    _store_halves(values, first, second, v_scale_ptr, v_head, pair, half, is_value, is_v_head, HAS_SCALES)


@triton.jit
def _turn(first, second, cos, sin):
    """Return both halves turned; the product with the cosine is rounded first, as `rotary.rotate` does."""
    dtype = first.dtype
    a, b = first.to(tl.float32), second.to(tl.float32)
    turned_first = (a * cos).to(dtype).to(tl.float32) - b * sin
    turned_second = (b * cos).to(dtype).to(tl.float32) + a * sin
    return turned_first.to(dtype), turned_second.to(dtype)
