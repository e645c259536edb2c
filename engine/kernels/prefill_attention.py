"""Prefill attention on the GPU: chunks of prompts side by side over paged K/V, causal, in one launch.

The K/V of a chunk are in its pages before; storing them is left to the caller.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention_tiles import LOG2_E, attend_tiles


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """block_m queries (tokens times the heads of a K/V head) by block_n keys per step."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def choose_prefill_config(num_tokens: int, num_chunks: int, group_size: int, itemsize: int) -> PrefillConfig:
    """Return the configuration for so many tokens in so many chunks and K/V of `itemsize` bytes."""
    if itemsize == 4:
        return PrefillConfig(32, 32, num_warps=4, num_stages=2)
    if num_tokens * group_size <= 64 * num_chunks:
        return PrefillConfig(64, 64, num_warps=4, num_stages=3)
    return PrefillConfig(128, 64, num_warps=8, num_stages=3)


def attend_prefill(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    window_starts: Tensor,
    *,
    config: PrefillConfig,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Return [T, Hq, D], attention of q [T, Hq, D], where token i of chunk c reads positions from
    window_starts[c] to starts[c] + i.

    k_pages, v_pages: [num_blocks, block_size, Hkv, D], any strides but the last, of q's dtype, or
    float8_e4m3fn with k_scale, v_scale [Hkv] float32 (None: 1). block_tables [C, P], cu_seqlens [C + 1],
    starts and window_starts [C] are integers. A chunk may be empty, or stand before position 0, where it
    reads nothing and its answer is 0. Reads nothing back.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, group_size = k_pages.shape[2], num_heads // k_pages.shape[2]
    num_chunks = starts.shape[0]
    assert k_pages.stride() == v_pages.stride(), (k_pages.stride(), v_pages.stride())
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    # A bound, since only the device knows the lengths: the last tile of each chunk may hold one query.
    num_tiles = (q.shape[0] * group_size + num_chunks * (config.block_m - 1)) // config.block_m
    _prefill_kernel[(num_tiles, num_kv_heads)](
        *(q, k_pages, v_pages, block_tables, cu_seqlens, starts, window_starts, out, k_scale, v_scale),
        *(LOG2_E * head_dim**-0.5, num_chunks),
        *q.stride()[:2],
        *k_pages.stride()[:3],
        block_tables.stride(0),
        NUM_HEADS=num_heads,
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_pages.shape[1],
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_CHUNKS=max(16, triton.next_power_of_2(num_chunks)),
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )
    return out


@triton.jit
def _find_chunk(tile, cu_seqlens, num_chunks, GROUP_SIZE, BLOCK_M, BLOCK_CHUNKS: tl.constexpr):
    """Return (chunk, first query of the tile in its chunk) of a tile counted over all chunks; past the last
    tile a chunk that does not exist.

    The last tile of a chunk comes first: it reads most.
    """
    chunk = tl.arange(0, BLOCK_CHUNKS)
    is_chunk = chunk < num_chunks
    begin = tl.load(cu_seqlens + chunk, mask=is_chunk, other=0)
    end = tl.load(cu_seqlens + chunk + 1, mask=is_chunk, other=0)
    num_tiles = tl.cdiv((end - begin).to(tl.int32) * GROUP_SIZE, BLOCK_M)
    tile_end = tl.cumsum(num_tiles, 0)
    own = tl.sum((tile_end <= tile).to(tl.int32), 0)
    own_end = tl.sum(tl.where(chunk == own, tile_end, 0), 0)
    return own, (own_end - 1 - tile) * BLOCK_M


@triton.jit(do_not_specialize=["num_chunks", "table_row"])
def _prefill_kernel(
    q_ptr,
    k_pages,
    v_pages,
    tables,
    cu_seqlens,
    starts,
    window_starts,
    out,
    k_scale,
    v_scale,
    scale,
    num_chunks,
    q_token,
    q_head,
    page_stride,
    page_token,
    page_head,
    table_row,
    NUM_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    head = tl.program_id(1)
    chunk, first = _find_chunk(tl.program_id(0), cu_seqlens, num_chunks, GROUP_SIZE, BLOCK_M, BLOCK_CHUNKS)
    if chunk >= num_chunks:
        return
    begin = tl.load(cu_seqlens + chunk).to(tl.int64)
    num_tokens = (tl.load(cu_seqlens + chunk + 1) - begin).to(tl.int32)
    start = tl.load(starts + chunk).to(tl.int32)
    window_start = tl.load(window_starts + chunk).to(tl.int32)
    m = first + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, HEAD_DIM)
    token = m // GROUP_SIZE
    query_head = head * GROUP_SIZE + m % GROUP_SIZE
    is_query = token < num_tokens
    q_offset = (begin + token) * q_token + query_head * q_head
    q = tl.load(q_ptr + q_offset[:, None] + dim[None, :], mask=is_query[:, None], other=0.0)
    if k_pages.dtype.element_ty != q_ptr.dtype.element_ty:
        # float16 holds every float8 value; a query beyond its range would drown all scores anyway.
        q = tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    value_scale = 1.0
    if k_scale is not None:
        scale *= tl.load(k_scale + head)
    if v_scale is not None:
        value_scale = tl.load(v_scale + head)
    stop = start + tl.minimum((first + BLOCK_M - 1) // GROUP_SIZE + 1, num_tokens)
    result, _ = attend_tiles(
        q,
        k_pages + tl.cast(head, tl.int64) * page_head,
        v_pages + tl.cast(head, tl.int64) * page_head,
        tables + chunk.to(tl.int64) * table_row,
        (window_start // BLOCK_N * BLOCK_N, stop, stop),
        (window_start, start + first // GROUP_SIZE + 1),
        (window_start + tl.zeros([BLOCK_M], tl.int32), tl.minimum(start + token + 1, stop)),
        (page_stride, page_token),
        scale,
        None,
        None,
        BLOCK_SIZE,
        BLOCK_N,
        STAGES,
    )
    result *= value_scale
    cells = (begin + token) * NUM_HEADS + query_head
    tl.store(
        out + cells[:, None] * HEAD_DIM + dim[None, :],
        result.to(out.dtype.element_ty),
        mask=is_query[:, None],
    )
