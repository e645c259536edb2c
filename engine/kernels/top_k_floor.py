"""The floor that top-k leaves in each row, found by radix search over split vocabularies.

The order is that of `sampling/truncation`: logit falling, then id rising. Top-p and min-p are left to `sift`.
"""

import triton
import triton.language as tl

from engine.kernels.draw_row import (
    AHEAD,
    BINS,
    FLOOR,
    NUM_BINS,
    NUM_DONE,
    NUM_TIES,
    PREFIX,
    Column,
    DrawRows,
    chunk_of_program,
    is_last_program,
    load_logits,
    locate_row,
    value_at,
)
from engine.kernels.ordered_key import ordered_key

_DIGIT_BITS = 8
_BLOCK = 1024


def find_floors(rows: DrawRows, temperature: Column, top_k: Column) -> None:
    """Set FLOOR and NUM_TIES of every row where top-k is on and the temperature is not 0.

    Always the same launches; the programs of other rows end at once.
    """
    for shift in range((rows.num_key_bits - 1) // _DIGIT_BITS * _DIGIT_BITS, -1, -_DIGIT_BITS):
        _digit_kernel[rows.grid](
            *(rows.arguments, rows.tie_counts, temperature, top_k),
            SHIFT=shift,
            IS_FIRST=shift + _DIGIT_BITS >= rows.num_key_bits,
            BLOCK=_BLOCK,
            **rows.options,
        )


@triton.jit
def _digit_kernel(
    rows,
    tie_counts,
    temperature_column,
    top_k_column,
    SHIFT: tl.constexpr,
    IS_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    EVERY: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Find one digit of the floor from how many tokens have each value of it."""
    batch_row, _, is_drawn, logits, state = locate_row(rows, EVERY, OVERLAP)
    top_k = value_at(top_k_column, batch_row)
    if is_drawn & (value_at(temperature_column, batch_row) > 0) & (top_k < rows.vocab_size):
        prefix = tl.load(state + PREFIX).to(tl.uint32)
        counts = tl.zeros([NUM_BINS], tl.int32)
        split, num_splits = tl.program_id(1), tl.num_programs(1)
        start, end = chunk_of_program(rows)
        while start < end:
            token_id = start + tl.arange(0, BLOCK)
            key = ordered_key(load_logits(logits, rows, token_id)) >> KEY_SHIFT >> SHIFT
            is_open = token_id < rows.vocab_size
            if not IS_FIRST:
                is_open &= key // NUM_BINS == prefix
            if tl.max(is_open.to(tl.int32), 0) > 0:
                counts += tl.histogram((key % NUM_BINS).to(tl.int32), NUM_BINS, mask=is_open)
            start += BLOCK
        digit = tl.arange(0, NUM_BINS)
        tl.atomic_add(state + BINS + digit, counts.to(tl.int64), counts > 0, sem="relaxed")
        if SHIFT == 0:
            row_ties = tie_counts + (tl.program_id(0).to(tl.int64) * num_splits + split) * NUM_BINS
            tl.store(row_ties + digit, counts)
        if is_last_program(state + NUM_DONE, num_splits):
            row_counts = tl.load(state + BINS + digit, cache_modifier=".cg")
            tl.store(state + BINS + digit, tl.zeros([NUM_BINS], tl.int64))
            _choose_digit(state, row_counts, top_k, prefix, digit, SHIFT == 0)


@triton.jit
def _choose_digit(state, counts, top_k, prefix, digit, IS_LAST: tl.constexpr):
    """Take the lowest digit with fewer than top_k tokens ahead of it."""
    ahead = tl.load(state + AHEAD) + tl.sum(counts, 0) - tl.cumsum(counts, 0)
    # Non-increasing along the digits, so the number that overrun top_k is the lowest that does not.
    chosen = tl.sum((ahead >= top_k).to(tl.int32), 0)
    chosen_ahead = tl.sum(tl.where(digit == chosen, ahead, 0), 0)
    digits = prefix.to(tl.int64) * NUM_BINS + chosen
    if IS_LAST:
        tl.store(state + FLOOR, digits)
        tl.store(state + NUM_TIES, top_k - chosen_ahead)
        tl.store(state + PREFIX, 0)
        tl.store(state + AHEAD, 0)
    else:
        tl.store(state + PREFIX, digits)
        tl.store(state + AHEAD, chosen_ahead)


@triton.jit
def is_above_floor(key, token_id, rows, num_ties, num_seen, floor, KEY_SHIFT: tl.constexpr) -> tl.tuple:
    """Return which tokens [C, 4], in rising order, top-k keeps, and how many lay on the floor up to here.

    num_seen: how many lay there before.
    """
    is_token = token_id < rows.vocab_size
    short_key = key >> KEY_SHIFT
    is_kept = is_token & (short_key > floor)
    is_tied = is_token & (short_key == floor)
    if (num_ties > 0) & (tl.max(is_tied.to(tl.int32)) > 0):
        tied = is_tied.to(tl.int32)
        num_tied = tl.sum(tied, 1)
        before = (num_seen + tl.cumsum(num_tied, 0) - num_tied)[:, None] + tl.cumsum(tied, 1) - tied
        is_kept |= is_tied & (before < num_ties)
        num_seen += tl.sum(num_tied, 0)
    return is_kept, num_seen


@triton.jit
def count_ties_before(row_ties, split, floor) -> tl.tensor:
    """Return how many tokens of the splits before this one lie on the floor."""
    digit = (floor % NUM_BINS).to(tl.int64)
    count = tl.zeros([128], tl.int32)
    start = split * 0
    while start < split:
        other = start + tl.arange(0, 128)
        count += tl.load(row_ties + other.to(tl.int64) * NUM_BINS + digit, other < split, 0)
        start += 128
    return tl.sum(count, 0)
