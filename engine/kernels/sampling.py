"""Verification of deterministic drafts on the GPU: one draw per node or per level, and the walk.

The law and the plain form are `sampling/verify`; which tokens may be drawn is found by `truncation`.
"""

from collections.abc import Callable
from typing import NamedTuple

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
    Column,
    DrawRows,
    column,
    is_last_program,
    load_logits,
    locate_row,
    value_at,
)
from engine.kernels.gumbel import gumbel, gumbel_bound, uniforms
from engine.kernels.ordered_key import (
    is_finite_key,
    key_of_packed,
    number_of_key,
    ordered_key,
    pack_key_and_id,
)
from engine.kernels.truncation import find_thresholds, weigh
from engine.kernels.walk import AnswerArguments, TreeArguments, walk
from engine.speculation import DraftOutput, SamplingTensors, TreeTensors, Verification

# Returns the warped logits [B, V] float32 of a level, truncation left out, of: the nodes [B]; the tokens [B]
# drawn in the level before, -1 where the path has ended, or None at the root; the level.
WarpLevel = Callable[[Tensor, Tensor | None, int], Tensor]

_BLOCK = 1024
# Drawing at every node saves the launches of each level but draws where no path goes. Worth it up to this
# many logits beyond those that a walk would read, by what is done with a logit.
_EXTRA_GREEDY = 1 << 23
_EXTRA_SAMPLED = 1 << 21
_EXTRA_TRUNCATED = 1 << 21


class NoiseArguments(NamedTuple):
    """How each batch row draws, and where its tree begins."""

    temperature: Column
    seed: Column
    min_p: Column
    root_position: Column


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
    overlap: bool = False,
) -> Verification:
    """Answer as `sampling.verify.verify` does for `draft.probs` None; no syncs, fixed launches.

    logits: [B, N, V] bfloat16, float16 or float32, any strides. stream: that of the noise. warp_level: called
    where the logits need more than truncation; then levels go one by one. is_every_node: draw at every node
    at once; chosen by size when None. With `overlap` (compute capability 9 and up) launches of one call come
    near while the one before still runs.
    """
    if is_every_node is None:
        is_every_node = _saves_time_at_every_node(logits, tree, sampling)
    is_every_node = is_every_node and warp_level is None
    rows = DrawRows.build(
        logits, tree.is_node, is_every_node=is_every_node, is_truncated=sampling.is_truncated
    )
    answer = _empty_answer(tree, logits.device)
    for level in range(1 if is_every_node else tree.depth + 1):
        if warp_level is not None:
            token = answer.token_ids[:, level - 1] if level else None
            rows = rows.reading(warp_level(rows.state[:, NODE.value], token, level))
        if sampling.is_truncated:
            find_thresholds(rows, sampling, overlap=overlap)
        _draw(rows, level, draft, tree, sampling, root_positions, answer, stream=stream, overlap=overlap)
    return answer


def _saves_time_at_every_node(logits: Tensor, tree: TreeTensors, sampling: SamplingTensors) -> bool:
    num_rows, num_nodes, vocab_size = logits.shape
    limit = _EXTRA_GREEDY
    if sampling.is_sampled:
        limit = _EXTRA_TRUNCATED if sampling.is_truncated else _EXTRA_SAMPLED
    # Levels read about three quarters of what they could: rows drop out.
    num_extra = num_rows * vocab_size * (num_nodes - 0.75 * (tree.depth + 1))
    return num_extra <= limit * tree.depth or num_nodes == 1


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
    draft: DraftOutput,
    tree: TreeTensors,
    sampling: SamplingTensors,
    root_positions: Tensor,
    answer: Verification,
    *,
    stream: int,
    overlap: bool,
) -> None:
    """Draw a token in every row and walk on: through the whole tree, or from `level` to the next."""
    for table in (tree.parents, tree.depths, tree.is_node):
        assert table.is_contiguous(), table.stride()
    columns = (sampling.temperature, sampling.seed, sampling.min_p, root_positions)
    _draw_kernel[rows.grid](
        *(rows.arguments, rows.tie_counts, NoiseArguments(*map(column, columns))),
        TreeArguments(tree.parents, tree.depths, draft.token_ids, draft.token_ids.stride(0)),
        AnswerArguments(
            *(answer.path, answer.num_accepted, answer.next_token, answer.token_ids),
            answer.is_finite.view(torch.uint8),
        ),
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
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=4,
        # logit + temperature * noise is rounded twice, as the plain form does.
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["level"])
def _draw_kernel(
    rows,
    tie_counts,
    noise,
    tree,
    answer,
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
    OVERLAP: tl.constexpr,
):
    """Draw from a chunk of a row; the last program of the batch row (EVERY) or of the row walks on."""
    batch_row, node, is_drawn, logits, state = locate_row(rows, EVERY, OVERLAP)
    if is_drawn:
        temperature = value_at(noise.temperature, batch_row)
        if IS_SAMPLED & (temperature > 0):
            depth = level
            if EVERY:
                depth += tl.load(tree.depths + batch_row * rows.num_nodes + node).to(tl.int32)
            position = value_at(noise.root_position, batch_row) + depth + 1
            row_ties = tie_counts + tl.program_id(0).to(tl.int64) * tl.num_programs(1) * NUM_BINS
            best = _best_of_noised(
                *(logits, rows, state, row_ties, temperature, position, value_at(noise.seed, batch_row)),
                *(value_at(noise.min_p, batch_row), STREAM, IS_TRUNCATED, KEY_SHIFT, CHUNK, BLOCK),
            )
        else:
            best = _best_of_plain(logits, rows, CHUNK, BLOCK)
        tl.atomic_max(state + BEST, best, sem="relaxed")
    num_splits = tl.num_programs(1)
    if EVERY:
        first = rows.state + batch_row.to(tl.int64) * rows.num_nodes * ROW_WORDS
        if is_last_program(first + NUM_DRAWN, rows.num_nodes * num_splits):
            walk(batch_row, node * 0, level, first, rows, tree, answer, DEPTH, True, BLOCK_N, BLOCK_D)
    elif is_drawn:  # noqa: SIM102 - `and` would count the programs of other rows
        if is_last_program(state + NUM_DONE, num_splits):
            arguments = (batch_row, node, level, state, rows, tree, answer)
            node, has_child = walk(*arguments, DEPTH, False, BLOCK_N, BLOCK_D)
            # The next level starts afresh.
            tl.store(state + NODE, node)
            tl.store(state + IS_CLOSED, (has_child == 0).to(tl.int64))
            tl.store(state + BEST, 0)
            tl.store(state + PEAK, 0)
            tl.store(state + THRESHOLD, 0)
            tl.store(state + NUM_TIES, 0)


@triton.jit
def _best_of_plain(logits, rows, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Return the packed argmax of this program's logits."""
    best = tl.zeros([BLOCK], tl.int64)
    for start in range(0, CHUNK, BLOCK):
        token_id = tl.program_id(1) * CHUNK + start + tl.arange(0, BLOCK)
        packed = pack_key_and_id(ordered_key(load_logits(logits, rows, token_id)), token_id)
        best = tl.maximum(best, tl.where(token_id < rows.vocab_size, packed, 0))
    return tl.max(best, 0)


@triton.jit
def _best_of_noised(
    logits,
    rows,
    state,
    row_ties,
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

    Tiles hold the four tokens of a Philox call side by side. Where a bound shows that none of a tile can beat
    what was drawn already, here or in another program, the logarithms are left out.
    """
    first = tl.program_id(1) * CHUNK
    peak_key = tl.load(state + PEAK).to(tl.uint32)
    has_peak = is_finite_key(peak_key)
    threshold = tl.where(has_peak, tl.load(state + THRESHOLD), 0).to(tl.uint32)
    num_ties = tl.load(state + NUM_TIES)
    num_seen = num_ties * 0
    if IS_TRUNCATED & (num_ties > 0):
        num_seen += _count_ties_before(row_ties, tl.program_id(1), threshold)
    lead = number_of_key(key_of_packed(tl.load(state + BEST, cache_modifier=".cg")))
    best = tl.zeros([BLOCK // 4, 4], tl.int64)
    for start in range(0, CHUNK, BLOCK):
        call_idx = (first + start) // 4 + tl.arange(0, BLOCK // 4)
        token_id = call_idx[:, None] * 4 + tl.arange(0, 4)[None, :]
        x = load_logits(logits, rows, token_id)
        is_kept = token_id < rows.vocab_size
        has_kept = True
        if IS_TRUNCATED:
            key = ordered_key(x) >> KEY_SHIFT
            is_tied = is_kept & (key == threshold)
            is_kept &= key > threshold
            if (num_ties > 0) & (tl.max(is_tied.to(tl.int32)) > 0):
                tied = is_tied.to(tl.int32)
                num_tied = tl.sum(tied, 1)
                before = (num_seen + tl.cumsum(num_tied, 0) - num_tied)[:, None] + tl.cumsum(tied, 1) - tied
                is_kept |= is_tied & (before < num_ties)
                num_seen += tl.sum(num_tied, 0)
            if has_peak & (min_p > 0):
                is_kept &= weigh(x, number_of_key(peak_key), temperature) >= min_p
            has_kept = tl.max(is_kept.to(tl.int32)) > 0
        if has_kept:
            v = uniforms(call_idx, STREAM, position, seed)
            is_beaten = gumbel_bound(v) * temperature + x < lead
            if tl.max((is_kept & (is_beaten == 0)).to(tl.int32)) > 0:
                packed = pack_key_and_id(ordered_key(gumbel(v) * temperature + x), token_id)
                best = tl.maximum(best, tl.where(is_kept, packed, 0))
                # A lead of NaN, as of no token, beats nobody.
                lead = number_of_key(key_of_packed(tl.max(best)))
    return tl.max(best)


@triton.jit
def _count_ties_before(row_ties, split, threshold):
    """Return how many tokens of the splits before this one lie on the threshold."""
    digit = (threshold % NUM_BINS).to(tl.int64)
    count = tl.zeros([128], tl.int32)
    start = split * 0
    while start < split:
        other = start + tl.arange(0, 128)
        count += tl.load(row_ties + other.to(tl.int64) * NUM_BINS + digit, other < split, 0)
        start += 128
    return tl.sum(count, 0)
