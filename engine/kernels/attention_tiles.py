"""The steps that attention kernels share: scores of a tile of keys, a running softmax, paged tiles.

What a query may read, and where results go, is left to the kernels; all is inlined into them. Shapes are
[M, n] for M queries and n keys, or [slices, M, n] where every warp has keys of its own.
"""

import triton
import triton.language as tl

# Below every score that a finite product can reach, yet finite: exp2(-inf - LOWEST) is zero, not NaN.
LOWEST = tl.constexpr(-1e30)
LOG2_E = 1.4426950408889634


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
    return tl.dot(q, turned, input_precision="ieee")


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
    acc = tl.dot(weights.to(compute_type), values.to(compute_type), acc, input_precision="ieee")
    return acc, new_top, total


@triton.jit
def attend_prefix(
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
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to the positions of span (begin, end, stop) in tiles; only those before `stop` are read."""
    acc, top, total = state
    begin, end, stop = span
    full_first, full_last = full_span
    node_start, node_end = windows
    page_stride, token_stride = strides
    lane = keys_of_tile(BLOCK_N, SLICES)
    offset = column(lane) * token_stride + tl.arange(0, q.shape[-1])
    # The table is read a tile ahead, so that no tile waits for it. A tile within a page needs one number.
    if BLOCK_SIZE >= BLOCK_N:
        page = tl.load(table + begin // BLOCK_SIZE, mask=begin < end, other=0)
    else:
        page = tl.load(table + (begin + lane) // BLOCK_SIZE, mask=begin + lane < stop, other=0)
    for n in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        position = n + lane
        is_read = column(position < stop)
        if BLOCK_SIZE >= BLOCK_N:
            base = page.to(tl.int64) * page_stride + (n % BLOCK_SIZE) * token_stride
            k_tile = k_pages + base + offset
            v_tile = v_pages + base + offset
            ahead = n + BLOCK_N
            page = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
        else:
            base = page.to(tl.int64) * page_stride + (position % BLOCK_SIZE) * token_stride
            k_tile = k_pages + column(base) + tl.arange(0, q.shape[-1])
            v_tile = v_pages + column(base) + tl.arange(0, q.shape[-1])
            ahead = position + BLOCK_N
            page = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < stop, other=0)
        scores = score(q, tl.load(k_tile, mask=is_read, other=0.0).to(q.dtype))
        if (n < full_first) | (n + BLOCK_N > full_last):
            is_seen = (line(position) >= node_start[:, None]) & (line(position) < node_end[:, None])
            scores = tl.where(is_seen, scores, -float("inf"))
        values = tl.load(v_tile, mask=is_read, other=0.0)
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
