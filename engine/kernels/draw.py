"""One draw per row, each row split over many programs: the argmax of logit + temperature * noise.

Which of these tokens top-p and min-p forbid is found by `sift`, where the path goes by `walk`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from engine.kernels.draw_row import (
    BEST,
    FLOOR,
    NUM_BINS,
    NUM_TIES,
    PEAK,
    Column,
    DrawRows,
    chunk_of_program,
    load_logits,
    locate_row,
    value_at,
)
from engine.kernels.gumbel import gumbel, gumbel_bound, uniforms
from engine.kernels.ordered_key import key_of_packed, number_of_key, ordered_key, pack_key_and_id
from engine.kernels.top_k_floor import count_ties_before, is_above_floor
from engine.kernels.walk import WalkArguments, walk_if_last

_BLOCK = 1024


class NoiseArguments(NamedTuple):
    """How each batch row draws, and where its tree begins."""

    temperature: Column
    seed: Column
    root_position: Column


def draw_rows(
    rows: DrawRows,
    noise: NoiseArguments,
    path: WalkArguments,
    *,
    stream: int,
    is_sampled: bool,
    is_truncated: bool,
) -> None:
    """Set BEST of every row among what top-k keeps, and PEAK where `is_truncated`; else walk on at once."""
    _draw_kernel[rows.grid](
        *(rows.arguments, rows.tie_counts, noise, path),
        STREAM=stream,
        IS_SAMPLED=is_sampled,
        IS_TRUNCATED=is_truncated,
        BLOCK=_BLOCK,
        # Noise is arithmetic: one Philox call a thread. Without it, a thread reads 16 bytes.
        num_warps=8 if is_sampled else 4,
        **rows.options,
    )


@triton.jit
def _draw_kernel(
    rows,
    tie_counts,
    noise,
    path,
    STREAM: tl.constexpr,
    IS_SAMPLED: tl.constexpr,
    IS_TRUNCATED: tl.constexpr,
    BLOCK: tl.constexpr,
    EVERY: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Draw from a chunk of a row; without truncation, the last program of a batch row walks on."""
    batch_row, node, is_drawn, logits, state = locate_row(rows, EVERY, OVERLAP)
    if is_drawn:
        best = tl.full([], 0, tl.int64)
        is_noised = False
        if IS_SAMPLED:
            temperature = value_at(noise.temperature, batch_row)
            is_noised = temperature > 0
            if is_noised:
                position = position_of_draw(batch_row, node, noise, rows, path)
                row_ties = tie_counts + tl.program_id(0).to(tl.int64) * tl.num_programs(1) * NUM_BINS
                best = _best_of_noised(
                    *(logits, rows, state, row_ties, temperature, position),
                    *(value_at(noise.seed, batch_row), STREAM, IS_TRUNCATED, KEY_SHIFT, BLOCK),
                )
        if not is_noised:
            best = _best_of_plain(logits, rows, BLOCK)
        tl.atomic_max(state + BEST, best, sem="relaxed")
    if not IS_TRUNCATED:
        walk_if_last(is_drawn, batch_row, rows, path, EVERY)


@triton.jit
def position_of_draw(batch_row, node, noise, rows, path) -> tl.tensor:
    """Return where the token drawn at `node` will sit."""
    depth = tl.load(path.depths + batch_row * rows.num_nodes + node)
    return value_at(noise.root_position, batch_row) + depth + 1


@triton.jit
def _best_of_plain(logits, rows, BLOCK: tl.constexpr):
    """Return the packed argmax of this program's logits."""
    best = tl.zeros([BLOCK], tl.int64)
    start, end = chunk_of_program(rows)
    while start < end:
        token_id = start + tl.arange(0, BLOCK)
        packed = pack_key_and_id(ordered_key(load_logits(logits, rows, token_id)), token_id)
        best = tl.maximum(best, tl.where(token_id < rows.vocab_size, packed, 0))
        start += BLOCK
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
    STREAM: tl.constexpr,
    IS_TRUNCATED: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the packed argmax of logit + temperature * noise over those of this program's tokens that top-k
    keeps.
    """
    floor, num_ties = tl.load(state + FLOOR).to(tl.uint32), tl.load(state + NUM_TIES)
    num_seen = num_ties * 0
    if IS_TRUNCATED & (num_ties > 0):
        num_seen += count_ties_before(row_ties, tl.program_id(1), floor)
    # What other programs have drawn so far: never above the final best.
    lead = key_of_packed(tl.load(state + BEST, cache_modifier=".cg"))
    best = tl.zeros([BLOCK // 4], tl.int64)
    peak = tl.zeros([BLOCK // 4], tl.uint32)
    start, end = chunk_of_program(rows)
    while start < end:
        call_idx, token_id = four_a_call(start, BLOCK)
        x = load_logits(logits, rows, token_id)
        is_kept = token_id < rows.vocab_size
        if IS_TRUNCATED:
            key = ordered_key(x)
            peak = tl.maximum(peak, tl.max(key, 1))
            is_kept, num_seen = is_above_floor(key, token_id, rows, num_ties, num_seen, floor, KEY_SHIFT)
        if tl.max(is_kept.to(tl.int32)) > 0:
            best, lead = draw_tile(
                best, lead, x, is_kept, call_idx, token_id, temperature, position, seed, STREAM
            )
        start += BLOCK
    if IS_TRUNCATED:
        tl.atomic_max(state + PEAK, tl.max(peak, 0).to(tl.int64), sem="relaxed")
    return tl.max(best, 0)


@triton.jit
def four_a_call(start, BLOCK: tl.constexpr) -> tl.tuple:
    """Return the Philox calls [BLOCK / 4] of the tokens from `start`, and the tokens [BLOCK / 4, 4] of
    each.
    """
    call_idx = start // 4 + tl.arange(0, BLOCK // 4)
    return call_idx, call_idx[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def draw_tile(
    best, lead, x, is_kept, call_idx, token_id, temperature, position, seed, STREAM: tl.constexpr
) -> tl.tuple:
    """Take a tile [C, 4] of logits into `best` [C], packed; return it and the key of the leading score.

    Where a bound shows that no token of the tile can beat the lead, the logarithms are left out.
    """
    v = uniforms(call_idx, STREAM, position, seed)
    # Ties go on, and so does NaN: it must win. The key of no token yet is that of a NaN, which beats nobody.
    is_beaten = gumbel_bound(v) * temperature + x < number_of_key(lead)
    if tl.max((is_kept & (is_beaten == 0)).to(tl.int32)) > 0:
        packed = pack_key_and_id(ordered_key(gumbel(v) * temperature + x), token_id)
        best = tl.maximum(best, tl.max(tl.where(is_kept, packed, 0), 1))
        lead = tl.maximum(lead, key_of_packed(tl.max(best, 0)))
    return best, lead
