"""Verification of deterministic drafts on the GPU: one draw per node or per level, then the walk.

The law and the plain form are `sampling/verify`; which tokens may be drawn is found by `truncation`.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.draw_row import (
    BEST,
    IS_CLOSED,
    NODE,
    NUM_BINS,
    NUM_DONE,
    NUM_DRAWN,
    NUM_TIES,
    PEAK,
    ROW_WORDS,
    THRESHOLD,
    DrawRows,
    is_last_program,
    locate_row,
)
from engine.kernels.gumbel import gumbel_of_word, random_words
from engine.kernels.ordered_key import (
    id_of_packed,
    is_finite_key,
    key_of_packed,
    number_of_key,
    ordered_key,
    pack_key_and_id,
)
from engine.kernels.truncation import find_thresholds, weigh
from engine.speculation import DraftOutput, SamplingTensors, TreeTensors, Verification

# Returns the warped logits [B, V] float32 of a level, truncation left out, of: the nodes [B]; the tokens [B]
# drawn in the level before, -1 where the path has ended, or None at the root; the level.
WarpLevel = Callable[[Tensor, Tensor | None, int], Tensor]

_BLOCK = 1024
_NUM_WARPS = 4
# Drawing at every node saves the launches of each level but draws where no path goes. Worth it up to this
# many logits beyond those that a walk would read, by what is done with a logit.
_EXTRA_GREEDY = 1 << 23
_EXTRA_SAMPLED = 1 << 20
_EXTRA_TRUNCATED = 1 << 21


def verify_drafts(
    logits: Tensor,
    draft: DraftOutput,
    tree: TreeTensors,
    sampling: SamplingTensors,
    root_positions: Tensor,
    *,
    stream: int,
    warp_level: WarpLevel | None = None,
    is_every_node: bool | None = None,
) -> Verification:
    """Answer as `sampling.verify.verify` does for `draft.probs` None; no syncs, fixed launches.

    logits: [B, N, V] bfloat16, float16 or float32, any strides. warp_level: called where the logits need more
    than truncation; then levels go one by one. is_every_node: draw at every node at once; chosen by size when
    None.
    """
    assert tree.parents.is_contiguous() and tree.depths.is_contiguous() and tree.is_node.is_contiguous()
    if is_every_node is None:
        is_every_node = _saves_time_at_every_node(logits, tree, sampling)
    is_every_node = is_every_node and warp_level is None
    answer = _empty_answer(tree, logits.device)
    arguments = (draft.token_ids, tree, sampling, root_positions, stream, answer)
    if is_every_node:
        rows = DrawRows.build(logits, tree.is_node, is_every_node=True, is_truncated=sampling.is_truncated)
        _draw(rows, 0, *arguments)
        return answer
    source = logits
    rows = DrawRows.build(logits, tree.is_node, is_every_node=False, is_truncated=sampling.is_truncated)
    for level in range(tree.depth + 1):
        if warp_level is not None:
            token = answer.token_ids[:, level - 1] if level else None
            source = warp_level(rows.state[:, NODE.value], token, level)
        _draw(rows.reading(source), level, *arguments)
    return answer


def _saves_time_at_every_node(logits: Tensor, tree: TreeTensors, sampling: SamplingTensors) -> bool:
    num_rows, num_nodes, vocab_size = logits.shape
    limit = _EXTRA_GREEDY
    if sampling.is_sampled:
        limit = _EXTRA_TRUNCATED if sampling.is_truncated else _EXTRA_SAMPLED
    return num_rows * vocab_size * (num_nodes - 0.75 * (tree.depth + 1)) <= limit * tree.depth


def _empty_answer(tree: TreeTensors, device: torch.device) -> Verification:
    num_rows, width = tree.num_rows, tree.depth + 1
    return Verification(
        path=torch.empty(num_rows, width, dtype=torch.int64, device=device),
        num_accepted=torch.empty(num_rows, dtype=torch.int64, device=device),
        next_token=torch.empty(num_rows, dtype=torch.int64, device=device),
        token_ids=torch.empty(num_rows, width, dtype=torch.int64, device=device),
        is_finite=torch.empty(num_rows, dtype=torch.bool, device=device),
    )


def _draw(
    rows: DrawRows,
    level: int,
    token_ids: Tensor,
    tree: TreeTensors,
    sampling: SamplingTensors,
    root_positions: Tensor,
    stream: int,
    answer: Verification,
) -> None:
    """Draw a token in every row and walk on: through the whole tree, or from `level` to the next."""
    if sampling.is_truncated:
        find_thresholds(rows, sampling)
    _draw_kernel[rows.grid](
        *rows.arguments,
        *(rows.tie_counts, tree.parents, tree.depths, token_ids, token_ids.stride(0)),
        *(sampling.temperature, sampling.temperature.stride(0), sampling.seed, sampling.seed.stride(0)),
        *(sampling.min_p, sampling.min_p.stride(0), root_positions, root_positions.stride(0)),
        *(answer.path, answer.token_ids, answer.num_accepted, answer.next_token),
        answer.is_finite.view(torch.uint8),
        level,
        STREAM=stream,
        DEPTH=tree.depth,
        EVERY=rows.is_every_node,
        IS_SAMPLED=sampling.is_sampled,
        IS_TRUNCATED=sampling.is_truncated,
        KEY_SHIFT=rows.key_shift,
        CHUNK=rows.chunk,
        BLOCK=_BLOCK,
        BLOCK_N=triton.next_power_of_2(tree.num_nodes),
        BLOCK_D=triton.next_power_of_2(tree.depth + 1),
        num_warps=_NUM_WARPS,
        # score = temperature * noise + logit is rounded twice, as the plain form does.
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["level"])
def _draw_kernel(
    logits_ptr,
    state_ptr,
    is_node_ptr,
    num_nodes,
    vocab_size,
    row_stride,
    node_stride,
    stride,
    tie_counts_ptr,
    parents_ptr,
    depths_ptr,
    draft_ptr,
    draft_stride,
    temperature_ptr,
    temperature_stride,
    seed_ptr,
    seed_stride,
    min_p_ptr,
    min_p_stride,
    root_positions_ptr,
    root_positions_stride,
    path_ptr,
    tokens_ptr,
    num_accepted_ptr,
    next_token_ptr,
    is_finite_ptr,
    level,
    STREAM: tl.constexpr,
    DEPTH: tl.constexpr,
    EVERY: tl.constexpr,
    IS_SAMPLED: tl.constexpr,
    IS_TRUNCATED: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    batch_row, node, is_drawn, logits, state = locate_row(
        logits_ptr, state_ptr, is_node_ptr, num_nodes, row_stride, node_stride, EVERY
    )
    if is_drawn:
        temperature = tl.load(temperature_ptr + batch_row * temperature_stride) if IS_SAMPLED else 0.0
        if temperature > 0:
            depth = tl.load(depths_ptr + batch_row * num_nodes + node) if EVERY else level
            position = tl.load(root_positions_ptr + batch_row * root_positions_stride) + depth + 1
            row_ties = tie_counts_ptr + tl.program_id(0).to(tl.int64) * tl.num_programs(1) * NUM_BINS
            best = _best_of_noised(
                *(logits, state, row_ties, vocab_size, stride, temperature, position),
                *(tl.load(seed_ptr + batch_row * seed_stride), tl.load(min_p_ptr + batch_row * min_p_stride)),
                *(STREAM, IS_TRUNCATED, KEY_SHIFT, CHUNK, BLOCK),
            )
        else:
            best = _best_of_plain(logits, vocab_size, stride, CHUNK, BLOCK)
        tl.atomic_max(state + BEST, best)
    if EVERY:
        first = state_ptr + batch_row.to(tl.int64) * num_nodes * ROW_WORDS
        is_last = is_last_program(first + NUM_DRAWN, num_nodes * tl.num_programs(1))
    else:
        first = state
        is_last = False
        if is_drawn:
            is_last = is_last_program(state + NUM_DONE, tl.num_programs(1))
    if is_last:
        nodes = tl.arange(0, BLOCK_N)
        is_node = nodes < num_nodes
        table = batch_row * num_nodes + nodes
        parents = tl.load(parents_ptr + table, is_node, -1)
        is_node = is_node & (tl.load(is_node_ptr + table, is_node, 0) != 0) & (nodes > 0)
        drafted = tl.load(draft_ptr + batch_row * draft_stride + nodes, is_node, -1)
        levels = tl.arange(0, BLOCK_D)
        is_level = levels <= DEPTH
        if EVERY:
            best = tl.load(first + nodes * ROW_WORDS + BEST, nodes < num_nodes, 0, cache_modifier=".cg")
        else:
            best = tl.full([BLOCK_N], 0, tl.int64) + tl.load(state + BEST, cache_modifier=".cg")
        here = node * 0 if EVERY else node
        path = tl.full([BLOCK_D], 0, tl.int64)
        tokens = tl.full([BLOCK_D], -1, tl.int64)
        out = batch_row * (DEPTH + 1) + levels
        if not EVERY:
            if level > 0:
                path = tl.load(path_ptr + out, is_level, 0)
                tokens = tl.load(tokens_ptr + out, is_level, -1)
        num_levels = DEPTH + 1 if EVERY else level + 1
        is_closed = False
        depth = num_levels * 0 if EVERY else level
        token = node * 0
        num_accepted = depth
        while depth < num_levels:
            packed = tl.sum(tl.where(nodes == here, best, 0), 0)
            is_finite = is_finite_key(key_of_packed(packed))
            token = tl.where(is_finite, id_of_packed(packed), 0)
            path = tl.where(is_finite, tl.where(levels >= depth, here, path), 0)
            kept = tl.where(levels < depth, tokens, -1)
            tokens = tl.where(levels == tl.where(is_finite, depth, 0), token, tl.where(is_finite, kept, -1))
            num_accepted = tl.where(is_finite, depth, 0)
            is_match = is_node & (parents == here) & (drafted == token)
            child = tl.min(tl.where(is_match, nodes, BLOCK_N), 0)
            is_closed = (child == BLOCK_N) | (is_finite == 0)
            here = tl.where(is_closed, here, child.to(tl.int64))
            tl.store(is_finite_ptr + batch_row, is_finite.to(tl.uint8))
            depth = tl.where(is_closed, num_levels, depth + 1)
        tl.store(path_ptr + out, path, is_level)
        tl.store(tokens_ptr + out, tokens, is_level)
        tl.store(num_accepted_ptr + batch_row, num_accepted.to(tl.int64))
        tl.store(next_token_ptr + batch_row, token)
        if not EVERY:
            # The next level starts afresh.
            tl.store(state + NODE, here)
            tl.store(state + IS_CLOSED, is_closed.to(tl.int64))
            tl.store(state + BEST, 0)
            if IS_TRUNCATED:
                tl.store(state + PEAK, 0)
                tl.store(state + THRESHOLD, 0)
                tl.store(state + NUM_TIES, 0)


@triton.jit
def _best_of_plain(logits, vocab_size, stride, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Return the packed argmax of this program's tokens."""
    best = tl.zeros([BLOCK], tl.int64)
    for start in range(0, CHUNK, BLOCK):
        token_id = tl.program_id(1) * CHUNK + start + tl.arange(0, BLOCK)
        is_token = token_id < vocab_size
        x = tl.load(logits + token_id.to(tl.int64) * stride, is_token, 0.0).to(tl.float32)
        best = tl.maximum(best, tl.where(is_token, pack_key_and_id(ordered_key(x), token_id), 0))
    return tl.max(best, 0)


@triton.jit
def _best_of_noised(
    logits,
    state,
    row_ties,
    vocab_size,
    stride,
    temperature,
    position,
    seed,
    min_p,
    STREAM: tl.constexpr,
    IS_TRUNCATED: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the packed argmax of logit + temperature * noise over this program's kept tokens.

    Four neighbouring tokens share a Philox call: a tile is four vectors of every fourth token.
    """
    split = tl.program_id(1)
    NUM_CALLS: tl.constexpr = BLOCK // 4
    peak = 0.0
    threshold, num_ties, num_seen = 0, 0, 0
    if IS_TRUNCATED:
        peak_key = tl.load(state + PEAK).to(tl.uint32)
        peak = number_of_key(peak_key)
        is_open = is_finite_key(peak_key) == 0
        threshold = tl.where(is_open, 0, tl.load(state + THRESHOLD)).to(tl.uint32)
        num_ties = tl.load(state + NUM_TIES)
        min_p = tl.where(is_open, 0.0, min_p)
        if num_ties > 0:
            num_seen = _ties_before(row_ties, split, threshold, NUM_BINS)
    best = tl.zeros([NUM_CALLS], tl.int64)
    for start in range(0, CHUNK, BLOCK):
        call_idx = (split * CHUNK + start) // 4 + tl.arange(0, NUM_CALLS)
        x0 = _load_fourth(logits, call_idx, 0, vocab_size, stride)
        x1 = _load_fourth(logits, call_idx, 1, vocab_size, stride)
        x2 = _load_fourth(logits, call_idx, 2, vocab_size, stride)
        x3 = _load_fourth(logits, call_idx, 3, vocab_size, stride)
        is_kept0 = call_idx * 4 < vocab_size
        is_kept1 = call_idx * 4 + 1 < vocab_size
        is_kept2 = call_idx * 4 + 2 < vocab_size
        is_kept3 = call_idx * 4 + 3 < vocab_size
        has_kept = True
        if IS_TRUNCATED:
            key0, key1 = ordered_key(x0) >> KEY_SHIFT, ordered_key(x1) >> KEY_SHIFT
            key2, key3 = ordered_key(x2) >> KEY_SHIFT, ordered_key(x3) >> KEY_SHIFT
            tied0, tied1 = (
                (is_kept0 & (key0 == threshold)).to(tl.int32),
                (is_kept1 & (key1 == threshold)).to(tl.int32),
            )
            tied2, tied3 = (
                (is_kept2 & (key2 == threshold)).to(tl.int32),
                (is_kept3 & (key3 == threshold)).to(tl.int32),
            )
            highest = tl.maximum(tl.maximum(key0, key1), tl.maximum(key2, key3))
            has_kept = tl.max(highest, 0) >= threshold
            if has_kept:
                num_tied = tied0 + tied1 + tied2 + tied3
                before = num_seen + tl.cumsum(num_tied, 0) - num_tied
                num_seen += tl.sum(num_tied, 0)
                is_kept0 &= (key0 > threshold) | ((tied0 > 0) & (before < num_ties))
                before += tied0
                is_kept1 &= (key1 > threshold) | ((tied1 > 0) & (before < num_ties))
                before += tied1
                is_kept2 &= (key2 > threshold) | ((tied2 > 0) & (before < num_ties))
                before += tied2
                is_kept3 &= (key3 > threshold) | ((tied3 > 0) & (before < num_ties))
                if min_p > 0:
                    is_kept0 &= weigh(x0, peak, temperature) >= min_p
                    is_kept1 &= weigh(x1, peak, temperature) >= min_p
                    is_kept2 &= weigh(x2, peak, temperature) >= min_p
                    is_kept3 &= weigh(x3, peak, temperature) >= min_p
        if has_kept:
            w0, w1, w2, w3 = random_words(call_idx, STREAM, position, seed)
            token_id = call_idx * 4
            best = tl.maximum(best, _score(x0, w0, temperature, token_id, is_kept0))
            best = tl.maximum(best, _score(x1, w1, temperature, token_id + 1, is_kept1))
            best = tl.maximum(best, _score(x2, w2, temperature, token_id + 2, is_kept2))
            best = tl.maximum(best, _score(x3, w3, temperature, token_id + 3, is_kept3))
    return tl.max(best, 0)


@triton.jit
def _load_fourth(logits, call_idx, offset: tl.constexpr, vocab_size, stride):
    token_id = call_idx * 4 + offset
    return tl.load(logits + token_id.to(tl.int64) * stride, token_id < vocab_size, -float("inf")).to(
        tl.float32
    )


@triton.jit
def _score(x, word, temperature, token_id, is_kept):
    score = gumbel_of_word(word) * temperature + x
    return tl.where(is_kept, pack_key_and_id(ordered_key(score), token_id), 0)


@triton.jit
def _ties_before(row_ties, split, threshold, NUM_BINS: tl.constexpr):
    """Return how many tokens of the splits before this one lie on the threshold."""
    digit = (threshold & NUM_BINS - 1).to(tl.int64)
    count = tl.zeros([128], tl.int32)
    start = split * 0
    while start < split:
        other = start + tl.arange(0, 128)
        count += tl.load(row_ties + other.to(tl.int64) * NUM_BINS + digit, other < split, 0)
        start += 128
    return tl.sum(count, 0)
