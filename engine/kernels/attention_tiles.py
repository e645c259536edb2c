"""The steps that attention kernels share: scores of a tile of keys, a running softmax, paged tiles.

What a query may read, and where results go, is left to the kernels; all is inlined into them. Shapes are
[M, n] for M queries and n keys, or [slices, M, n] where every warp has keys of its own.
"""

import triton
import triton.language as tl

# Below every score that a finite product can reach, yet finite: exp2(-inf - LOWEST) is zero, not NaN.
LOWEST = tl.constexpr(-1e30)
LOG2_E = 1.4426950408889634
# Bits of a word of the suffix mask.
MASK_BITS = tl.constexpr(64)


@triton.jit
def keys_of_tile(BLOCK: tl.constexpr, SLICES: tl.constexpr) -> tl.tensor:
    """Return the key numbers of a tile, [BLOCK], or [SLICES, n] where every warp has its own keys."""
    each: tl.constexpr = BLOCK // SLICES
    keys = tl.arange(0, each)
    if SLICES > 1:
        keys = tl.arange(0, SLICES)[:, None] * each + keys[None, :]
    return keys


@triton.jit
def column(x) -> tl.tensor:
    """Return x [...] as [..., 1]."""
    return tl.expand_dims(x, len(x.shape))


@triton.jit
def line(x) -> tl.tensor:
    """Return x [..., n] as [..., 1, n]."""
    return tl.expand_dims(x, len(x.shape) - 1)


@triton.jit
def score(q, keys) -> tl.tensor:
    """Return q [..., M, D] times keys [..., n, D], float32 [..., M, n]."""
    turned = tl.permute(keys, (0, 2, 1)) if len(keys.shape) == 3 else tl.trans(keys)
    return tl.dot(q, turned, input_precision="tf32x3")


@triton.jit
def accumulate(
    state, scores, values, scale, compute_type: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take scores [..., M, n] and values [..., n, D] into (acc, top, total), a running softmax."""
    acc, top, total = state
    new_top = tl.maximum(top, tl.max(scores, len(scores.shape) - 1) * scale)
    weights = tl.exp2(scores * scale - column(new_top))
    decay = tl.exp2(top - new_top)
    total = total * decay + tl.sum(weights, len(scores.shape) - 1)
    acc = acc * column(decay)
    acc = tl.dot(weights.to(compute_type), values.to(compute_type), acc, input_precision="tf32x3")
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
    lane,
    stop,
    strides,
    suffix_kv,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Return (k, v, offset [..., n, D], limit) of the tile at position n; what is before limit exists.

    page is the tile's page, or [..., n] those of its positions; strides are those of (pages, positions).
    """
    page_stride, token_stride = strides
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
        offset = column(lane) * token_stride + dim
    else:
        offset = column(base) + dim
    return k_tile, v_tile, offset, limit


@triton.jit
def _see_suffix(first, lane, suffix, BLOCK_N: tl.constexpr):
    """Return which of the suffix keys first + lane [..., n] each query sees, [..., M, n]; none before key 0.

    A word per query is read and spread: read as a matrix, the mask would drag the scores to its own layout.
    """
    num_suffix, mask, mask_offset, is_query = suffix
    is_seen = line(lane) < 0
    for part in tl.static_range(0, BLOCK_N, min(MASK_BITS, BLOCK_N)):
        key = first + part
        is_word = is_query & (key >= 0) & (key < num_suffix)
        word = tl.load(mask + mask_offset + key // MASK_BITS, mask=is_word, other=0)
        bit = line(lane) + (key % MASK_BITS - part)
        is_in_word = (line(lane) >= part) & (bit < MASK_BITS)
        is_seen = is_seen | (
            is_in_word & (column(word) >> tl.where(is_in_word, bit, 0).to(tl.int64) & 1 != 0)
        )
    return is_seen


@triton.jit
def attend_tiles(
    state,
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
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to the positions of span (begin, end, stop) in tiles; of the pages those before `stop` are read.

    suffix_kv: None, or (k, v, stride, first, end) where the positions [first, end) are the suffix keys, and
    suffix (keys, mask words, where each query's are, is_query [M]) says who sees them.
    """
    acc, top, total = state
    begin, end, stop = span
    full_first, full_last = full_span
    node_start, node_end = windows
    lane = keys_of_tile(BLOCK_N, SLICES)
    # The table is read a tile ahead, so that no tile waits for it. A tile within a page needs one number.
    page = _page_of(table, begin if BLOCK_SIZE >= BLOCK_N else begin + lane, stop, BLOCK_SIZE)
    for n in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        position = n + lane
        k_tile, v_tile, offset, limit = _locate_tile(
            k_pages, v_pages, page, n, lane, stop, strides, suffix_kv, BLOCK_SIZE, BLOCK_N, q.shape[-1]
        )
        ahead = (n if BLOCK_SIZE >= BLOCK_N else position) + BLOCK_N
        page = _page_of(table, ahead, stop, BLOCK_SIZE)
        is_read = column(position < limit)
        scores = score(q, tl.load(k_tile + offset, mask=is_read, other=0.0).to(q.dtype))
        if (n < full_first) | (n + BLOCK_N > full_last):
            is_seen = (line(position) >= node_start[:, None]) & (line(position) < node_end[:, None])
            if suffix_kv is not None:
                is_seen = is_seen | _see_suffix(n - suffix_kv[3], lane, suffix, BLOCK_N)
            scores = tl.where(is_seen, scores, -float("inf"))
        values = tl.load(v_tile + offset, mask=is_read, other=0.0)
        acc, top, total = accumulate((acc, top, total), scores, values, scale, q.dtype)
    return acc, top, total


@triton.jit
def finish(state, value_scale) -> tuple[tl.tensor, tl.tensor]:
    """Return (out [M, D], lse [M] to base 2) of a state, all slices together."""
    acc, top, total = state
    if len(acc.shape) == 3:
        best = tl.max(top, 0)
        weight = tl.exp2(top - best[None, :])
        acc = tl.sum(acc * column(weight), 0)
        total = tl.sum(total * weight, 0)
        top = best
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    lse = tl.where(is_empty, -float("inf"), top + tl.log2(total))
    return acc * (value_scale / total)[:, None], lse
