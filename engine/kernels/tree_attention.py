"""Tree attention on the GPU: N query nodes per row over a paged prefix and a masked suffix, in one launch.

The cut of rows is left to `tree_attention_plan`, the join of cut rows to `tree_attention_merge`, the choice
of tiles to `tree_attention_config`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention_tiles import LOG2_E, MASK_BITS, attend_tiles
from engine.kernels.tree_attention_config import TreeConfig
from engine.kernels.tree_attention_merge import merge_pieces
from engine.kernels.tree_attention_plan import (
    HEADER,
    UNIT_WORDS,
    TreePlan,
    tiles_of_row,
    union_of_windows,
)

LN_2 = tl.constexpr(0.6931471805599453)


def attend_tree(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    starts: Tensor,
    ends: Tensor,
    *,
    config: TreeConfig,
    plan: TreePlan,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    lse: Tensor | None = None,
    overlap: bool = False,
) -> Tensor:
    """Return [B, N, Hq, D], attention of q [B, N, Hq, D] over the windows and the suffix together.

    k, v: [B, S, Hkv, D] of the same strides; k_pages, v_pages: [num_blocks, block_size, Hkv, D], any strides
    but the last, of one dtype: q's, or float8_e4m3fn with k_scale, v_scale [Hkv] float32 (None: 1).
    block_tables [B, P], starts and ends [B, N] integers; plan: of these windows, from `make_plan` with this
    config. lse: [B, N, Hq] float32 is written when given. overlap (compute capability 9 and up): start before
    the kernel before ends. Reads nothing back and allocates from the caching allocator only.
    """
    num_rows, num_nodes, num_heads, head_dim = q.shape
    num_kv_heads, group_size = k_pages.shape[2], num_heads // k_pages.shape[2]
    num_units = config.max_units(num_rows)
    assert k_pages.stride() == v_pages.stride(), (k_pages.stride(), v_pages.stride())
    assert k.stride() == v.stride(), (k.stride(), v.stride())
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    cells = (num_units if plan.words is not None else 0, num_nodes * num_heads)
    part_out = torch.empty((*cells, head_dim), dtype=torch.float32, device=q.device)
    part_lse = torch.empty(cells, dtype=torch.float32, device=q.device)
    num_m_blocks = triton.cdiv(num_nodes * group_size, config.block_m)
    _tree_attention_kernel[(num_kv_heads * num_m_blocks, num_units)](
        *(q, k, v, k_pages, v_pages, block_tables, starts, ends, plan.mask, plan.words),
        *(out, lse, part_out, part_lse, k_scale, v_scale, LOG2_E * head_dim**-0.5),
        *(num_nodes, k.shape[1], block_tables.shape[1] * k_pages.shape[1]),
        *q.stride()[:3],
        *k.stride()[:3],
        *k_pages.stride()[:3],
        block_tables.stride(0),
        *starts.stride(),
        *ends.stride(),
        *(num_kv_heads, group_size, head_dim, k_pages.shape[1], config.block_m, config.block_n),
        *(triton.next_power_of_2(num_nodes) if plan.words is None else 1, config.num_stages, overlap),
        num_warps=config.num_warps,
        maxnreg=config.max_registers,
        launch_pdl=overlap,
    )
    if plan.words is not None:
        sizes = {"num_units": num_units, "num_cuts": config.max_cuts(num_rows)}
        merge_pieces(part_out, part_lse, plan.words, out, lse, **sizes, overlap=overlap)
    return out


@triton.jit
def _read_unit(
    words,
    unit,
    starts,
    ends,
    start_row,
    start_node,
    end_row,
    end_node,
    num_nodes,
    num_suffix,
    limit,
    BLOCK_N: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """Return the words of a unit, from the plan or, without one, for the whole row `unit`."""
    if words is not None:
        words += HEADER + UNIT_WORDS * unit
        row = tl.load(words)
        begin = tl.load(words + 1)
        end = tl.load(words + 2)
        stop = tl.load(words + 3)
        suffix_first = tl.load(words + 4)
        full_first = tl.load(words + 5)
        full_last = tl.load(words + 6)
        piece = tl.load(words + 7)
    else:
        row = unit
        each = tl.arange(0, BLOCK_NODES)
        first, stop, full_first, full_last = union_of_windows(
            starts + tl.cast(row, tl.int64) * start_row,
            ends + tl.cast(row, tl.int64) * end_row,
            each * start_node,
            each * end_node,
            each < num_nodes,
            limit,
            0,
        )
        begin, suffix_first, num_tiles = tiles_of_row(first, stop, num_suffix, BLOCK_N)
        end = begin + num_tiles * BLOCK_N
        piece = -1
    return row, begin, end, stop, suffix_first, full_first, full_last, piece


# Not specialised: a graph per batch and tree must not compile a kernel each.
@triton.jit(
    do_not_specialize=[
        *("num_nodes", "num_suffix", "limit", "table_row"),
        *("start_row", "start_node", "end_row", "end_node"),
    ]
)
def _tree_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_pages,
    v_pages,
    tables,
    starts,
    ends,
    mask,
    words,
    out,
    lse,
    part_out,
    part_lse,
    k_scale,
    v_scale,
    scale,
    num_nodes,
    num_suffix,
    limit,
    q_row,
    q_node,
    q_head,
    k_row,
    k_token,
    k_head,
    page_stride,
    page_token,
    page_head,
    table_row,
    start_row,
    start_node,
    end_row,
    end_node,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    unit_row, begin, end, stop, suffix_first, full_first, full_last, piece = _read_unit(
        *(words, tl.program_id(1), starts, ends, start_row, start_node, end_row, end_node),
        *(num_nodes, num_suffix, limit, BLOCK_N, BLOCK_NODES),
    )
    if unit_row < 0:
        return
    # Heads and query blocks are neighbours in the grid: they read the same pages at the same time.
    head = tl.program_id(0) % NUM_KV_HEADS
    m = tl.program_id(0) // NUM_KV_HEADS * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, HEAD_DIM)
    node = m // GROUP_SIZE
    is_query = node < num_nodes
    query_head = head * GROUP_SIZE + m % GROUP_SIZE
    row = tl.cast(unit_row, tl.int64)
    q_offset = row * q_row + (node * q_node + query_head * q_head)[:, None] + dim[None, :]
    q = tl.load(q_ptr + q_offset, mask=is_query[:, None], other=0.0)
    if k_ptr.dtype.element_ty != q_ptr.dtype.element_ty:
        # float16 holds every float8 value; a query beyond its range would drown all scores anyway.
        q = tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    node_start = tl.load(starts + row * start_row + node * start_node, mask=is_query, other=0)
    node_end = tl.load(ends + row * end_row + node * end_node, mask=is_query, other=0)
    value_scale = 1.0
    if k_scale is not None:
        scale *= tl.load(k_scale + head)
    if v_scale is not None:
        value_scale = tl.load(v_scale + head)
    head_offset = tl.cast(head, tl.int64) * page_head
    suffix_offset = row * k_row + head * k_head
    result, result_lse = attend_tiles(
        q,
        k_pages + head_offset,
        v_pages + head_offset,
        tables + row * table_row,
        (begin, end, stop),
        (full_first, full_last),
        (node_start.to(tl.int32), tl.minimum(node_end, stop).to(tl.int32)),
        (page_stride, page_token),
        scale,
        (k_ptr + suffix_offset, v_ptr + suffix_offset, k_token, suffix_first, suffix_first + num_suffix),
        (
            num_suffix,
            mask + row * num_nodes * tl.cdiv(num_suffix, MASK_BITS),
            node * tl.cdiv(num_suffix, MASK_BITS),
            is_query,
        ),
        BLOCK_SIZE,
        BLOCK_N,
        STAGES,
    )
    result *= value_scale
    cell = node * (NUM_KV_HEADS * GROUP_SIZE) + query_head
    num_cells = num_nodes * (NUM_KV_HEADS * GROUP_SIZE)
    if piece < 0:
        cells = row * num_cells + cell
        offset = cells[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out + offset, result.to(out.dtype.element_ty), mask=is_query[:, None])
        if lse is not None:
            tl.store(lse + cells, result_lse * LN_2, mask=is_query)
    else:
        cells = tl.cast(piece, tl.int64) * num_cells + cell
        tl.store(part_out + cells[:, None] * HEAD_DIM + dim[None, :], result, mask=is_query[:, None])
        tl.store(part_lse + cells, result_lse, mask=is_query)
