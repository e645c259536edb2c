"""Tree attention on the GPU: N query nodes per row over a paged prefix and a masked suffix, in one launch.

The cut into shares is left to `tree_attention_plan`, the join of cut rows to `tree_attention_merge`, the
choice of tiles to `tree_attention_config`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention_tiles import (
    LOG2_E,
    LOWEST,
    accumulate,
    attend_prefix,
    column,
    finish,
    keys_of_tile,
    line,
    score,
)
from engine.kernels.tree_attention_config import TreeConfig
from engine.kernels.tree_attention_merge import merge_pieces
from engine.kernels.tree_attention_plan import HEADER, MASK_BITS, ROW_WORDS, TreePlan, union_of_windows

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
) -> Tensor:
    """Return [B, N, Hq, D], attention of q [B, N, Hq, D] over the windows and the suffix together.

    k, v: [B, S, Hkv, D]; k_pages, v_pages: [num_blocks, block_size, Hkv, D], any strides but the last, of one
    dtype: q's, or float8_e4m3fn with k_scale, v_scale [Hkv] float32 (None: 1). block_tables [B, P], starts
    and ends [B, N] integers; plan: of these windows, from `make_plan` with this config. lse: [B, N, Hq]
    float32 is written when given. Reads nothing back and allocates from the caching allocator only.
    """
    num_rows, num_nodes, num_heads, head_dim = q.shape
    num_kv_heads, group_size = k_pages.shape[2], num_heads // k_pages.shape[2]
    num_groups = config.num_groups or num_rows
    assert k_pages.stride() == v_pages.stride(), (k_pages.stride(), v_pages.stride())
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    cells = (2 * config.num_groups, num_nodes * num_heads)
    part_out = torch.empty((*cells, head_dim), dtype=torch.float32, device=q.device)
    part_lse = torch.empty(cells, dtype=torch.float32, device=q.device)
    num_m_blocks = triton.cdiv(num_nodes * group_size, config.block_m)
    _tree_attention_kernel[(num_kv_heads * num_m_blocks, num_groups)](
        *(q, k, v, k_pages, v_pages, block_tables, starts, ends, plan.mask, plan.cuts),
        *(out, lse, part_out, part_lse, k_scale, v_scale, LOG2_E * head_dim**-0.5),
        *(num_rows, num_nodes, k.shape[1], block_tables.shape[1] * k_pages.shape[1]),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *k_pages.stride()[:3],
        block_tables.stride(0),
        *starts.stride(),
        *ends.stride(),
        NUM_KV_HEADS=num_kv_heads,
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_pages.shape[1],
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_S=config.block_s,
        BLOCK_NODES=triton.next_power_of_2(num_nodes) if plan.cuts is None else 1,
        SLICES=config.num_slices,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        maxnreg=config.max_registers,
    )
    if plan.cuts is not None:
        merge_pieces(part_out, part_lse, plan.cuts, out, lse, num_groups=num_groups)
    return out


@triton.jit
def _attend_suffix(
    state,
    q,
    k,
    v,
    mask,
    num_keys,
    num_suffix,
    strides,
    is_query,
    scale,
    BLOCK_S: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Attend to the first num_keys suffix keys (all or none) that mask [M] int32 words shows."""
    k_token, v_token = strides
    lane = keys_of_tile(BLOCK_S, SLICES)
    dim = tl.arange(0, q.shape[-1])
    for s in tl.range(0, num_keys, BLOCK_S, num_stages=1):
        key = s + lane
        is_key = column(key < num_suffix)
        keys = tl.load(k + column(key) * k_token + dim, mask=is_key, other=0.0)
        scores = score(q, keys.to(q.dtype))
        is_word = is_query[:, None] & line(key < num_suffix)
        word = tl.load(mask[:, None] + line(key // MASK_BITS), mask=is_word, other=0)
        scores = tl.where(word >> line(key % MASK_BITS) & 1 != 0, scores, -float("inf"))
        values = tl.load(v + column(key) * v_token + dim, mask=is_key, other=0.0)
        state = accumulate(state, scores, values, scale, q.dtype)
    return state


@triton.jit
def _row_words(cuts, row, starts, ends, start_node, end_node, num_nodes, limit, BLOCK_N, BLOCK_NODES):
    """Return (first tile, last tile + 1, first position, end, first and end of what every node reads)."""
    if cuts is not None:
        words = cuts + HEADER + row * ROW_WORDS
        tile_begin = tl.load(words)
        tile_end = tl.load(words + 1)
        first = tl.load(words + 2)
        stop = tl.load(words + 3)
        full_first = tl.load(words + 4)
        full_last = tl.load(words + 5)
    else:
        each = tl.arange(0, BLOCK_NODES)
        first, stop, full_first, full_last = union_of_windows(
            starts, ends, each * start_node, each * end_node, each < num_nodes, limit, BLOCK_N, 0
        )
        first = tl.minimum(first, stop)
        tile_begin = 0
        tile_end = tl.cdiv(stop - first, BLOCK_N) + 1
    return tile_begin, tile_end, first, stop, full_first, full_last


# Not specialised: a graph per batch and tree must not compile a kernel each.
@triton.jit(
    do_not_specialize=[
        *("num_rows", "num_nodes", "num_suffix", "limit", "table_row"),
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
    cuts,
    out,
    lse,
    part_out,
    part_lse,
    k_scale,
    v_scale,
    scale,
    num_rows,
    num_nodes,
    num_suffix,
    limit,
    q_row,
    q_node,
    q_head,
    k_row,
    k_token,
    k_head,
    v_row,
    v_token,
    v_head,
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
    BLOCK_S: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Heads and query blocks are neighbours in the grid: they read the same pages at the same time.
    head = tl.program_id(0) % NUM_KV_HEADS
    group = tl.program_id(1)
    m = tl.program_id(0) // NUM_KV_HEADS * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, HEAD_DIM)
    node = m // GROUP_SIZE
    is_query = node < num_nodes
    query_head = head * GROUP_SIZE + m % GROUP_SIZE
    cell = node * (NUM_KV_HEADS * GROUP_SIZE) + query_head
    num_cells = num_nodes * (NUM_KV_HEADS * GROUP_SIZE)
    num_words = tl.cdiv(num_suffix, MASK_BITS)
    k_pages += tl.cast(head, tl.int64) * page_head
    v_pages += tl.cast(head, tl.int64) * page_head
    value_scale = 1.0
    if k_scale is not None:
        scale *= tl.load(k_scale + head)
    if v_scale is not None:
        value_scale = tl.load(v_scale + head)
    share_begin = 0
    share_end = 2**30
    row_begin = group
    row_end = group + 1
    if cuts is not None:
        share = tl.load(cuts)
        share_begin = group * share
        share_end = share_begin + share
        groups = cuts + HEADER + num_rows * ROW_WORDS
        row_begin = tl.load(groups + 2 * group)
        row_end = tl.load(groups + 2 * group + 1)
    for each_row in tl.range(row_begin, row_end, num_stages=1):
        row = tl.cast(each_row, tl.int64)
        own_starts = starts + row * start_row
        own_ends = ends + row * end_row
        tile_begin, tile_end, first, stop, full_first, full_last = _row_words(
            cuts,
            row,
            own_starts,
            own_ends,
            start_node,
            end_node,
            num_nodes,
            limit,
            BLOCK_N,
            BLOCK_NODES,
        )
        q_offset = row * q_row + (node * q_node + query_head * q_head)[:, None] + dim[None, :]
        q = tl.load(q_ptr + q_offset, mask=is_query[:, None], other=0.0)
        if k_ptr.dtype.element_ty != q_ptr.dtype.element_ty:
            # float16 holds every float8 value; a query beyond its range would drown all scores anyway.
            q = tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
        node_start = tl.load(own_starts + node * start_node, mask=is_query, other=0).to(tl.int32)
        node_end = tl.load(own_ends + node * end_node, mask=is_query, other=0).to(tl.int32)
        if SLICES == 1:
            acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
            top = tl.full([BLOCK_M], LOWEST, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
        else:
            q = tl.broadcast_to(q[None, :, :], [SLICES, BLOCK_M, HEAD_DIM])
            acc = tl.zeros([SLICES, BLOCK_M, HEAD_DIM], tl.float32)
            top = tl.full([SLICES, BLOCK_M], LOWEST, tl.float32)
            total = tl.zeros([SLICES, BLOCK_M], tl.float32)
        state = (acc, top, total)
        begin_tile = tl.maximum(share_begin, tile_begin)
        end_tile = tl.minimum(share_end, tile_end)
        # The last tile of a row is its suffix.
        has_suffix = end_tile == tile_end
        state = _attend_suffix(
            state,
            q,
            k_ptr + row * k_row + head * k_head,
            v_ptr + row * v_row + head * v_head,
            mask + (row * num_nodes + node) * num_words,
            tl.where(has_suffix, num_suffix, 0),
            num_suffix,
            (k_token, v_token),
            is_query,
            scale,
            BLOCK_S,
            SLICES,
        )
        begin = first + (begin_tile - tile_begin) * BLOCK_N
        end = first + (tl.minimum(end_tile, tile_end - 1) - tile_begin) * BLOCK_N
        state = attend_prefix(
            state,
            q,
            k_pages,
            v_pages,
            tables + row * table_row,
            (begin, end, stop),
            (full_first, full_last),
            (node_start, node_end),
            (page_stride, page_token),
            scale,
            BLOCK_SIZE,
            BLOCK_N,
            SLICES,
            STAGES,
        )
        result, result_lse = finish(state, value_scale)
        if (begin_tile == tile_begin) & has_suffix:
            cells = row * num_cells + cell
            offset = cells[:, None] * HEAD_DIM + dim[None, :]
            tl.store(out + offset, result.to(out.dtype.element_ty), mask=is_query[:, None])
            if lse is not None:
                tl.store(lse + cells, result_lse * LN_2, mask=is_query)
        else:
            # A share has at most two cut rows: the one it goes on with, and the one it breaks off.
            piece = 2 * group + (tile_begin > share_begin).to(tl.int32)
            cells = tl.cast(piece, tl.int64) * num_cells + cell
            tl.store(part_out + cells[:, None] * HEAD_DIM + dim[None, :], result, mask=is_query[:, None])
            tl.store(part_lse + cells, result_lse, mask=is_query)
