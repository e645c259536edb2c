"""The threshold that top-k and top-p leave in each row, found by radix search over split vocabularies.

The rules are those of `sampling/truncation`, to the integer; min-p and the draw are left to `sampling`.
"""

import triton
import triton.language as tl

from engine.kernels.draw_row import (
    AHEAD,
    BINS,
    BUDGET,
    NUM_BINS,
    NUM_DONE,
    NUM_TIES,
    PEAK,
    PREFIX,
    THRESHOLD,
    DrawRows,
    column,
    is_last_program,
    load_logits,
    locate_row,
    value_at,
)
from engine.kernels.ordered_key import is_finite_key, number_of_key, ordered_key
from engine.speculation import SamplingTensors

# Probabilities as integers of 2**-44 of the largest: their sums are exact in any order.
WEIGHT_UNIT = tl.constexpr(2.0**44)
_KEY_BITS = 32
# Digits of a search by count. A search by mass ends with such a digit too: one value of it is one logit.
_COUNT_BITS = 8
_MASS_BITS = 4
_BLOCK = 1024
_MASS_BLOCK = 512


def find_thresholds(rows: DrawRows, sampling: SamplingTensors, *, overlap: bool) -> None:
    """Set PEAK, THRESHOLD and NUM_TIES of every row; rows at temperature 0 or without a finite peak keep all.

    Always the same launches. In those that a row does not need, its programs end at once.
    """
    temperature, top_k, top_p = map(column, (sampling.temperature, sampling.top_k, sampling.top_p))
    arguments = rows.arguments
    key_bits = _KEY_BITS - rows.key_shift
    # Without fusion, a logit weighs the same in every kernel.
    options = {"EVERY": rows.is_every_node, "CHUNK": rows.chunk, "OVERLAP": overlap, "launch_pdl": overlap}
    options["enable_fp_fusion"] = False
    _peak_kernel[rows.grid](arguments, temperature, BLOCK=_BLOCK, **options)
    options["KEY_SHIFT"] = rows.key_shift
    for shift, bits in _digits(key_bits, _COUNT_BITS):
        digit = {"SHIFT": shift, "BITS": bits, "IS_FIRST": shift + bits == key_bits, "IS_MASS": False}
        _count_kernel[rows.grid](
            arguments, rows.tie_counts, temperature, top_k, BLOCK=_BLOCK, **digit, **options
        )
    for shift, bits in _digits(key_bits, _MASS_BITS)[: -_COUNT_BITS // _MASS_BITS]:
        digit = {"SHIFT": shift, "BITS": bits, "IS_FIRST": shift + bits == key_bits}
        # One warp, so that each thread holds all bins of its own tokens.
        digit["num_warps"] = 1
        _mass_kernel[rows.grid](arguments, temperature, top_p, BLOCK=_MASS_BLOCK, **digit, **options)
    digit = {"SHIFT": 0, "BITS": _COUNT_BITS, "IS_FIRST": False, "IS_MASS": True}
    _count_kernel[rows.grid](arguments, rows.tie_counts, temperature, top_p, BLOCK=_BLOCK, **digit, **options)


def _digits(num_bits: int, digit_bits: int) -> list[tuple[int, int]]:
    """Return (shift, bits) of the digits of a number of `num_bits`, highest first; the first may be short."""
    shifts = range((num_bits - 1) // digit_bits * digit_bits, -1, -digit_bits)
    return [(shift, min(digit_bits, num_bits - shift)) for shift in shifts]


@triton.jit
def weigh(x, peak, temperature) -> tl.tensor:
    """Return exp((x - peak) / temperature) float32."""
    return tl.exp((x - peak) / temperature)


@triton.jit
def _integer_weight(x, peak, temperature):
    return (weigh(x, peak, temperature) * WEIGHT_UNIT).to(tl.int64)


@triton.jit
def _has_prefix(key, prefix, SHIFT: tl.constexpr, BITS: tl.constexpr, IS_FIRST: tl.constexpr):
    """Return whether the digits of `key` above the one at SHIFT are `prefix`; the first digit has none."""
    has_prefix = key == key
    if not IS_FIRST:
        has_prefix = key >> SHIFT + BITS == prefix
    return has_prefix


@triton.jit
def _digit(key, SHIFT: tl.constexpr, BITS: tl.constexpr):
    return (key >> SHIFT & (1 << BITS) - 1).to(tl.int32)


@triton.jit
def _peak_kernel(
    rows,
    temperature_column,
    EVERY: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Find the key of each row's largest logit."""
    batch_row, _, is_drawn, logits, state = locate_row(rows, EVERY, OVERLAP)
    if is_drawn & (value_at(temperature_column, batch_row) > 0):
        highest = tl.zeros([BLOCK], tl.uint32)
        for start in range(0, CHUNK, BLOCK):
            token_id = tl.program_id(1) * CHUNK + start + tl.arange(0, BLOCK)
            highest = tl.maximum(highest, ordered_key(load_logits(logits, rows, token_id)))
        tl.atomic_max(state + PEAK, tl.max(highest, 0).to(tl.int64), sem="relaxed")


@triton.jit
def _count_kernel(
    rows,
    tie_counts,
    temperature_column,
    limit_column,
    EVERY: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    IS_FIRST: tl.constexpr,
    IS_MASS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Find one digit of the threshold from how many tokens have each value of it.

    The limit is top_k, or top_p where IS_MASS: the last digit of a search by mass.
    """
    batch_row, _, is_drawn, logits, state = locate_row(rows, EVERY, OVERLAP)
    temperature = value_at(temperature_column, batch_row)
    peak_key = tl.load(state + PEAK).to(tl.uint32)
    limit = value_at(limit_column, batch_row)
    is_limited = limit < 1.0 if IS_MASS else limit < rows.vocab_size
    if is_drawn & (temperature > 0) & is_finite_key(peak_key) & is_limited:
        prefix = tl.load(state + PREFIX).to(tl.uint32)
        counts = tl.zeros([NUM_BINS], tl.int32)
        split, num_splits = tl.program_id(1), tl.num_programs(1)
        for start in range(0, CHUNK, BLOCK):
            token_id = split * CHUNK + start + tl.arange(0, BLOCK)
            key = ordered_key(load_logits(logits, rows, token_id)) >> KEY_SHIFT
            is_open = (token_id < rows.vocab_size) & _has_prefix(key, prefix, SHIFT, BITS, IS_FIRST)
            if tl.max(is_open.to(tl.int32), 0) > 0:
                counts += tl.histogram(_digit(key, SHIFT, BITS), NUM_BINS, mask=is_open)
        values = tl.arange(0, NUM_BINS)
        tl.atomic_add(state + BINS + values, counts.to(tl.int64), counts > 0, sem="relaxed")
        if SHIFT == 0:
            row_ties = tie_counts + (tl.program_id(0).to(tl.int64) * num_splits + split) * NUM_BINS
            tl.store(row_ties + values, counts)
        if is_last_program(state + NUM_DONE, num_splits):
            mass = tl.load(state + BINS + values, cache_modifier=".cg")
            tl.store(state + BINS + values, tl.zeros([NUM_BINS], tl.int64))
            weight = tl.full([NUM_BINS], 1, tl.int64)
            if IS_MASS:
                budget = tl.load(state + BUDGET)
                key = (prefix << BITS) + values.to(tl.uint32)
                mass = _count_above_floor(state, key, mass)
                number = number_of_key(key, KEY_SHIFT)
                weight = _integer_weight(number, number_of_key(peak_key), temperature)
                weight = tl.where(mass > 0, weight, 0)
                mass *= weight
            else:
                budget = limit.to(tl.int64)
            _choose_digit(state, mass, weight, budget, prefix, values, BITS, SHIFT == 0)


@triton.jit
def _count_above_floor(state, key, counts):
    """Return the counts of those tokens that top-k kept."""
    floor = tl.load(state + THRESHOLD).to(tl.uint32)
    return tl.where(key == floor, tl.load(state + NUM_TIES), tl.where(key > floor, counts, 0))


@triton.jit
def _choose_digit(state, mass, weight, budget, prefix, values, BITS: tl.constexpr, IS_LAST: tl.constexpr):
    """Take the lowest value with less than `budget` ahead of it; the last digit ends the search."""
    ahead = tl.load(state + AHEAD) + tl.sum(mass, 0) - tl.cumsum(mass, 0)
    chosen = tl.minimum(tl.sum((ahead >= budget).to(tl.int32), 0), (1 << BITS) - 1)
    chosen_ahead = tl.sum(tl.where(values == chosen, ahead, 0), 0)
    threshold = (prefix.to(tl.int64) << BITS) + chosen
    if IS_LAST:
        tie_weight = tl.maximum(tl.sum(tl.where(values == chosen, weight, 0), 0), 1)
        tl.store(state + THRESHOLD, threshold)
        tl.store(state + NUM_TIES, (budget - chosen_ahead + tie_weight - 1) // tie_weight)
        tl.store(state + PREFIX, 0)
        tl.store(state + AHEAD, 0)
    else:
        tl.store(state + PREFIX, threshold)
        tl.store(state + AHEAD, chosen_ahead)


@triton.jit
def _mass_kernel(
    rows,
    temperature_column,
    top_p_column,
    EVERY: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    IS_FIRST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Find one digit of the threshold of top-p from the weight of the tokens with each value of it."""
    batch_row, _, is_drawn, logits, state = locate_row(rows, EVERY, OVERLAP)
    temperature = value_at(temperature_column, batch_row)
    top_p = value_at(top_p_column, batch_row)
    peak_key = tl.load(state + PEAK).to(tl.uint32)
    if is_drawn & (temperature > 0) & is_finite_key(peak_key) & (top_p < 1.0):
        peak = number_of_key(peak_key)
        prefix = tl.load(state + PREFIX).to(tl.uint32)
        # Tokens on the floor of top-k are weighed by the last program: only some of them were kept.
        floor = tl.load(state + THRESHOLD).to(tl.uint32)
        values = tl.arange(0, 1 << BITS)
        mass = tl.zeros([1 << BITS], tl.int64)
        for start in range(0, CHUNK, BLOCK):
            token_id = tl.program_id(1) * CHUNK + start + tl.arange(0, BLOCK)
            x = load_logits(logits, rows, token_id)
            key = ordered_key(x) >> KEY_SHIFT
            is_open = (token_id < rows.vocab_size) & (key > floor)
            is_open &= _has_prefix(key, prefix, SHIFT, BITS, IS_FIRST)
            weight = tl.where(is_open, _integer_weight(x, peak, temperature), 0)
            if tl.max(weight, 0) > 0:
                is_value = _digit(key, SHIFT, BITS)[None, :] == values[:, None]
                mass += tl.sum(tl.where(is_value, weight[None, :], 0), 1)
        tl.atomic_add(state + BINS + values, mass, mass > 0, sem="relaxed")
        if is_last_program(state + NUM_DONE, tl.num_programs(1)):
            mass = tl.load(state + BINS + values, cache_modifier=".cg")
            tl.store(state + BINS + values, tl.zeros([1 << BITS], tl.int64))
            num_ties = tl.load(state + NUM_TIES)
            if (num_ties > 0) & _has_prefix(floor, prefix, SHIFT, BITS, IS_FIRST):
                tied = num_ties * _integer_weight(number_of_key(floor, KEY_SHIFT), peak, temperature)
                mass += tl.where(values == _digit(floor, SHIFT, BITS), tied, 0)
            if IS_FIRST:
                share = top_p.to(tl.float64) * tl.sum(mass, 0).to(tl.float64)
                budget = share.to(tl.int64)
                budget += (budget.to(tl.float64) < share).to(tl.int64)
                tl.store(state + BUDGET, budget)
            else:
                budget = tl.load(state + BUDGET)
            _choose_digit(state, mass, mass, budget, prefix, values, BITS, False)
