"""The steps that attention kernels share: paged tiles of keys, their scores, a running softmax.

What a query may read, and where results go, is left to the kernels; all is inlined into them. M counts the
queries of a program, n the keys of a tile.
"""

import triton
import triton.language as tl

# Below every score that a finite product can reach, yet finite: exp2(-inf - LOWEST) is zero, not NaN.
LOWEST = tl.constexpr(-1e30)
LOG2_E = 1.4426950408889634
# Bits of a word of the suffix mask.
MASK_BITS = tl.constexpr(64)


@triton.jit
def _accumulate(state, scores, values, scale):
    """Take scores [M, n] and values [n, D] into (acc, top, total), a running softmax."""
    acc, top, total = state
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_top[:, None])
    decay = tl.exp2(top - new_top)
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="tf32x3")
    return acc, new_top, total


@triton.jit
def _page_of(table, position, end, BLOCK_SIZE: tl.constexpr):
    """Return the page of a position, or of each; of positions from `end` on the first page of all."""
    return tl.load(table + position // BLOCK_SIZE, mask=position < end, other=0)


@triton.jit
def _locate_tile(
    k_pages,
    v_pages,
    page,
    n,
    stop,
    strides,
    suffix_kv,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Return (k, v, offset [n, D], limit) of the tile at position n; what is before limit exists.

    page is the tile's page, or [n] those of its positions; strides are those of (pages, positions).
    """
    page_stride, token_stride = strides
    lane = tl.arange(0, BLOCK_N)
    first = n if BLOCK_SIZE >= BLOCK_N else n + lane
    base = page.to(tl.int64) * page_stride + (first % BLOCK_SIZE) * token_stride
    k_tile = k_pages
    v_tile = v_pages
    limit = stop
    if suffix_kv is not None:
        k_suffix, v_suffix, suffix_stride, suffix_first, suffix_end = suffix_kv
        is_suffix = n >= suffix_first
        # A pointer that is chosen forgets how it is aligned.
        k_tile = tl.multiple_of(tl.where(is_suffix, k_suffix, k_pages), 16)
        v_tile = tl.multiple_of(tl.where(is_suffix, v_suffix, v_pages), 16)
        base = tl.where(is_suffix, tl.cast((first - suffix_first) * suffix_stride, tl.int64), base)
        token_stride = tl.where(is_suffix, suffix_stride, token_stride)
        limit = tl.where(is_suffix, suffix_end, stop)
    dim = tl.arange(0, HEAD_DIM)
    if BLOCK_SIZE >= BLOCK_N:
        k_tile += base
        v_tile += base
        offset = lane[:, None] * token_stride + dim[None, :]
    else:
        offset = base[:, None] + dim[None, :]
    return k_tile, v_tile, offset, limit


@triton.jit
def _see_suffix(first, suffix, BLOCK_N: tl.constexpr):
    """Return which of the suffix keys from `first` on each query sees, [M, n]; none before key 0.

    A word per query is read and spread: read as a matrix, the mask would drag the scores to its own layout.
    """
    num_suffix, mask, mask_offset, is_query = suffix
    lane = tl.arange(0, BLOCK_N)[None, :]
    is_seen = lane < 0
    for part in tl.static_range(0, BLOCK_N, min(MASK_BITS, BLOCK_N)):
        key = first + part
        is_word = is_query & (key >= 0) & (key < num_suffix)
        word = tl.load(mask + mask_offset + key // MASK_BITS, mask=is_word, other=0)
        bit = lane + (key % MASK_BITS - part)
        is_in_word = (lane >= part) & (bit < MASK_BITS)
        is_shown = word[:, None] >> tl.where(is_in_word, bit, 0).to(tl.int64) & 1 != 0
        is_seen = is_seen | (is_in_word & is_shown)
    return is_seen


@triton.jit
def attend_tiles(
    q,
    k_pages,
    v_pages,
    table,
    span,
    full_span,
    windows,
    strides,
    scale,
    suffix_kv,
    suffix,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return (out [M, D], lse [M] to base 2), both float32, of q [M, D] over the positions of `span`.

    span: (begin, end, stop), read in tiles; of the pages the positions before `stop`. All queries read
    full_span, the others their windows. suffix_kv: None, or (k, v, stride, first, end) where the positions
    [first, end) are the suffix keys, and suffix (keys, mask words, where each query's are, is_query [M]) says
    who sees them. Without any key, out is 0 and lse is -inf.
    """
    begin, end, stop = span
    full_first, full_last = full_span
    node_start, node_end = windows
    lane = tl.arange(0, BLOCK_N)
    acc = tl.zeros([q.shape[0], q.shape[1]], tl.float32)
    top = tl.full([q.shape[0]], LOWEST, tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    # The table is read a tile ahead, so that no tile waits for it. A tile within a page needs one number.
    page = _page_of(table, begin if BLOCK_SIZE >= BLOCK_N else begin + lane, stop, BLOCK_SIZE)
    for n in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        position = n + lane
        k_tile, v_tile, offset, limit = _locate_tile(
            k_pages, v_pages, page, n, stop, strides, suffix_kv, BLOCK_SIZE, BLOCK_N, q.shape[1]
        )
        ahead = (n if BLOCK_SIZE >= BLOCK_N else position) + BLOCK_N
        page = _page_of(table, ahead, stop, BLOCK_SIZE)
        is_read = (position < limit)[:, None]
        keys = tl.load(k_tile + offset, mask=is_read, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(keys), input_precision="tf32x3")
        if (n < full_first) | (n + BLOCK_N > full_last):
            is_seen = (position[None, :] >= node_start[:, None]) & (position[None, :] < node_end[:, None])
            if suffix_kv is not None:
                is_seen = is_seen | _see_suffix(n - suffix_kv[3], suffix, BLOCK_N)
            scores = tl.where(is_seen, scores, -float("inf"))
        values = tl.load(v_tile + offset, mask=is_read, other=0.0).to(q.dtype)
        acc, top, total = _accumulate((acc, top, total), scores, values, scale)
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    return acc / total[:, None], tl.where(is_empty, -float("inf"), top + tl.log2(total))
