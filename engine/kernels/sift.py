"""Top-p and min-p after the draw: is the drawn token among those they keep, and if not, what is drawn then?

Both rules keep a leading part of the order by logit and id. A token that leads all others of a set which
covers that part, and lies in it, leads the part; one that does not lie in it leaves only the tokens ahead of
it. With a share p of the probability kept, a draw has Poisson(ln(1 / p)) tokens to reject. The rules are
those of `sampling/truncation`, to the integer; top-k came before, in `top_k_floor`.
"""

import triton
import triton.language as tl

from engine.kernels.draw import NoiseArguments, draw_tile, four_a_call, position_of_draw
from engine.kernels.draw_row import (
    AHEAD,
    BEST,
    FLOOR,
    IS_SETTLED,
    NEXT,
    NUM_DONE,
    NUM_TIES,
    PEAK,
    TOTAL,
    Column,
    DrawRows,
    chunk_of_program,
    is_last_program,
    load_logits,
    locate_row,
    value_at,
)
from engine.kernels.ordered_key import id_of_packed, is_finite_key, number_of_key, ordered_key
from engine.kernels.walk import WalkArguments, walk_if_last

# Probabilities as integers of 2**-44 of the largest: their sums are exact in any order.
WEIGHT_UNIT = tl.constexpr(2.0**44)
_BLOCK = 1024
# Launches that split a row; what they leave, about one draw in 5,000 at p = 0.9, one program per row sifts.
_NUM_SPLIT_SIFTS = 3
_REST_BLOCK = 2048
_REST_WARPS = 16


def sift_rows(
    rows: DrawRows,
    noise: NoiseArguments,
    top_p: Column,
    min_p: Column,
    path: WalkArguments,
    *,
    stream: int,
) -> None:
    """Replace BEST of every row by what is drawn among the kept tokens, and walk on.

    Always the same launches; the programs of rows that are settled end at once.
    """
    arguments = (rows.arguments, noise, top_p, min_p, path)
    for _ in range(_NUM_SPLIT_SIFTS):
        _split_kernel[rows.grid](*arguments, STREAM=stream, BLOCK=_BLOCK, num_warps=8, **rows.options)
    _rest_kernel[rows.grid[:1]](
        *arguments,
        STREAM=stream,
        BLOCK=_REST_BLOCK,
        num_warps=_REST_WARPS,
        **rows.options,
    )


@triton.jit
def _split_kernel(
    rows,
    noise,
    top_p_column,
    min_p_column,
    path,
    STREAM: tl.constexpr,
    BLOCK: tl.constexpr,
    EVERY: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sift once, each row split over its programs."""
    batch_row, node, is_drawn, logits, state = locate_row(rows, EVERY, OVERLAP)
    if is_drawn:
        temperature, top_p, min_p = _rules(batch_row, noise, top_p_column, min_p_column)
        if _is_unsettled(state, temperature, top_p, min_p):
            position = position_of_draw(batch_row, node, noise, rows, path)
            start, end = chunk_of_program(rows)
            ahead, total, following = _weigh_and_redraw(
                *(logits, rows, state, tl.load(state + BEST), temperature, min_p, position),
                *(value_at(noise.seed, batch_row), start, end, STREAM, KEY_SHIFT, BLOCK),
            )
            tl.atomic_add(state + AHEAD, ahead, sem="relaxed")
            tl.atomic_add(state + TOTAL, total, sem="relaxed")
            tl.atomic_max(state + NEXT, following, sem="relaxed")
            if is_last_program(state + NUM_DONE, tl.num_programs(1)):
                ahead = tl.load(state + AHEAD, cache_modifier=".cg")
                total = tl.load(state + TOTAL, cache_modifier=".cg")
                drawn = tl.load(state + BEST)
                if _is_kept(drawn, logits, rows, state, ahead, total, temperature, top_p, min_p, KEY_SHIFT):
                    tl.store(state + IS_SETTLED, 1)
                else:
                    tl.store(state + BEST, tl.load(state + NEXT, cache_modifier=".cg"))
                    tl.store(state + NEXT, 0)
                    tl.store(state + AHEAD, 0)
                    tl.store(state + TOTAL, 0)


@triton.jit
def _rest_kernel(
    rows,
    noise,
    top_p_column,
    min_p_column,
    path,
    STREAM: tl.constexpr,
    BLOCK: tl.constexpr,
    EVERY: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sift until the row is settled, in one program; the last of a batch row walks on."""
    batch_row, node, is_drawn, logits, state = locate_row(rows, EVERY, OVERLAP)
    if is_drawn:
        temperature, top_p, min_p = _rules(batch_row, noise, top_p_column, min_p_column)
        is_unsettled = _is_unsettled(state, temperature, top_p, min_p)
        drawn = tl.load(state + BEST)
        while is_unsettled:
            position = position_of_draw(batch_row, node, noise, rows, path)
            ahead, total, following = _weigh_and_redraw(
                *(logits, rows, state, drawn, temperature, min_p, position),
                *(value_at(noise.seed, batch_row), batch_row * 0, rows.vocab_size, STREAM, KEY_SHIFT, BLOCK),
            )
            is_kept = _is_kept(drawn, logits, rows, state, ahead, total, temperature, top_p, min_p, KEY_SHIFT)
            drawn = tl.where(is_kept, drawn, following)
            is_unsettled = is_kept == 0
        tl.store(state + BEST, drawn)
    walk_if_last(is_drawn, batch_row, rows, path, EVERY)


@triton.jit
def _rules(batch_row, noise, top_p_column, min_p_column):
    temperature = value_at(noise.temperature, batch_row)
    return temperature, value_at(top_p_column, batch_row), value_at(min_p_column, batch_row)


@triton.jit
def _is_unsettled(state, temperature, top_p, min_p):
    """Return whether the drawn token might be forbidden."""
    is_limited = (temperature > 0) & ((top_p < 1.0) | (min_p > 0))
    return (
        is_limited & is_finite_key(tl.load(state + PEAK).to(tl.uint32)) & (tl.load(state + IS_SETTLED) == 0)
    )


@triton.jit
def _probability(x, state, temperature):
    """Return that of logits x as a share of the largest, exp((x - peak) / temperature)."""
    peak = number_of_key(tl.load(state + PEAK).to(tl.uint32))
    return tl.exp((x - peak) / temperature)


@triton.jit
def _integer_weight(probability):
    return (probability * WEIGHT_UNIT).to(tl.int64)


@triton.jit
def _weigh_and_redraw(
    logits,
    rows,
    state,
    drawn,
    temperature,
    min_p,
    position,
    seed,
    start,
    end,
    STREAM: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return, of the tokens from `start` to `end`: the weight of those ahead of the `drawn` one; the weight
    of those above top-k's floor; and the packed best of those ahead that min-p keeps.
    """
    drawn_id = id_of_packed(drawn)
    drawn_key = ordered_key(load_logits(logits, rows, drawn_id))
    floor = tl.load(state + FLOOR).to(tl.uint32)
    ahead = tl.zeros([BLOCK // 4], tl.int64)
    total = tl.zeros([BLOCK // 4], tl.int64)
    best = tl.zeros([BLOCK // 4], tl.int64)
    lead = floor * 0
    while start < end:
        call_idx, token_id = four_a_call(start, BLOCK)
        x = load_logits(logits, rows, token_id)
        key = ordered_key(x)
        probability = _probability(x, state, temperature)
        weight = _integer_weight(probability)
        is_ahead = (key > drawn_key) | ((key == drawn_key) & (token_id < drawn_id))
        is_ahead &= token_id < rows.vocab_size
        ahead += tl.sum(tl.where(is_ahead, weight, 0), 1)
        total += tl.sum(tl.where(key >> KEY_SHIFT > floor, weight, 0), 1)
        is_kept = is_ahead & (probability >= min_p)
        if tl.max(is_kept.to(tl.int32)) > 0:
            best, lead = draw_tile(
                best, lead, x, is_kept, call_idx, token_id, temperature, position, seed, STREAM
            )
        start += BLOCK
    return tl.sum(ahead, 0), tl.sum(total, 0), tl.max(best, 0)


@triton.jit
def _is_kept(drawn, logits, rows, state, ahead, total, temperature, top_p, min_p, KEY_SHIFT: tl.constexpr):
    """Return whether top-p and min-p keep the `drawn` token, which has the weight `ahead` before it.

    total: the weight above top-k's floor, to which the tokens kept on it are added.
    """
    num_ties = tl.load(state + NUM_TIES)
    if num_ties > 0:
        on_floor = number_of_key(tl.load(state + FLOOR).to(tl.uint32), KEY_SHIFT)
        total += num_ties * _integer_weight(_probability(on_floor, state, temperature))
    share = top_p.to(tl.float64) * total.to(tl.float64)
    budget = share.to(tl.int64)
    budget += (budget.to(tl.float64) < share).to(tl.int64)
    probability = _probability(load_logits(logits, rows, id_of_packed(drawn)), state, temperature)
    return ((ahead < budget) | (top_p >= 1.0)) & (probability >= min_p)
