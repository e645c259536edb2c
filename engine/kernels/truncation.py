"""The threshold that top-k, top-p and min-p leave in each row, found by radix search over split vocabularies.

The rules are those of `sampling/truncation`, to the integer; drawing among what is kept is left to
`sampling`.
"""

import triton
import triton.language as tl
from torch import Tensor

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
    is_last_program,
    locate_row,
)
from engine.kernels.ordered_key import is_finite_key, number_of_key, ordered_key
from engine.speculation import SamplingTensors

# Probabilities as integers of 2**-44 of the largest: sums are exact in any order.
WEIGHT_UNIT = tl.constexpr(2.0**44)
_KEY_BITS = 32
_BLOCK = 1024
_MASS_BLOCK = 512
# Digits of a count search, and of a mass search before its last digit, which is a count again.
_COUNT_BITS = 8
_MASS_BITS = 4
_NUM_WARPS = 4


def find_thresholds(rows: DrawRows, sampling: SamplingTensors) -> None:
    """Set PEAK, THRESHOLD and NUM_TIES of every row. Rows at temperature 0 or without a finite peak keep
    all.
    """
    temperature, top_k, top_p = sampling.temperature, sampling.top_k, sampling.top_p
    options = {"EVERY": rows.is_every_node, "CHUNK": rows.chunk, "num_warps": _NUM_WARPS}
    options["enable_fp_fusion"] = False
    _peak_kernel[rows.grid](*rows.arguments, temperature, temperature.stride(0), BLOCK=_BLOCK, **options)
    key_bits = _KEY_BITS - rows.key_shift
    for shift, bits in _digits(key_bits, _COUNT_BITS):
        _count(rows, temperature, top_k, shift, bits, is_mass=False, key_bits=key_bits, options=options)
    for shift, bits in _digits(key_bits - _COUNT_BITS, _MASS_BITS):
        _mass_kernel[rows.grid](
            *rows.arguments,
            *(temperature, temperature.stride(0), top_p, top_p.stride(0)),
            KEY_SHIFT=rows.key_shift,
            SHIFT=shift + _COUNT_BITS,
            BITS=bits,
            IS_FIRST=shift + bits + _COUNT_BITS == key_bits,
            BLOCK=_MASS_BLOCK,
            **options,
        )
    _count(rows, temperature, top_p, 0, _COUNT_BITS, is_mass=True, key_bits=key_bits, options=options)


def _digits(num_bits: int, digit_bits: int) -> list[tuple[int, int]]:
    """Return (shift, bits) of the digits of a number of `num_bits`, highest first; the first may be short."""
    shifts = range((num_bits - 1) // digit_bits * digit_bits, -1, -digit_bits)
    return [(shift, min(digit_bits, num_bits - shift)) for shift in shifts]


def _count(
    rows: DrawRows,
    temperature: Tensor,
    limit: Tensor,
    shift: int,
    bits: int,
    *,
    is_mass: bool,
    key_bits: int,
    options: dict[str, int | bool],
) -> None:
    _count_kernel[rows.grid](
        *rows.arguments,
        *(rows.tie_counts, temperature, temperature.stride(0), limit, limit.stride(0)),
        KEY_SHIFT=rows.key_shift,
        SHIFT=shift,
        BITS=bits,
        IS_FIRST=shift + bits == key_bits,
        IS_MASS=is_mass,
        BLOCK=_BLOCK,
        **options,
    )


@triton.jit
def weigh(x, peak, temperature):
    """Return exp((x - peak) / temperature) float32."""
    return tl.exp((x - peak) / temperature)


@triton.jit
def _integer_weight(x, peak, temperature):
    return (weigh(x, peak, temperature) * WEIGHT_UNIT).to(tl.int64)


@triton.jit
def _peak_kernel(
    logits_ptr,
    state_ptr,
    is_node_ptr,
    num_nodes,
    vocab_size,
    row_stride,
    node_stride,
    stride,
    temperature_ptr,
    temperature_stride,
    EVERY: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    batch_row, _, is_drawn, logits, state = locate_row(
        logits_ptr, state_ptr, is_node_ptr, num_nodes, row_stride, node_stride, EVERY
    )
    if is_drawn:
        if tl.load(temperature_ptr + batch_row * temperature_stride) > 0:
            highest = tl.zeros([BLOCK], tl.uint32)
            for start in range(0, CHUNK, BLOCK):
                token_id = tl.program_id(1) * CHUNK + start + tl.arange(0, BLOCK)
                x = tl.load(logits + token_id.to(tl.int64) * stride, token_id < vocab_size, -float("inf"))
                highest = tl.maximum(highest, ordered_key(x.to(tl.float32)))
            tl.atomic_max(state + PEAK, tl.max(highest, 0).to(tl.int64))


@triton.jit
def _count_kernel(
    logits_ptr,
    state_ptr,
    is_node_ptr,
    num_nodes,
    vocab_size,
    row_stride,
    node_stride,
    stride,
    tie_counts_ptr,
    temperature_ptr,
    temperature_stride,
    limit_ptr,
    limit_stride,
    EVERY: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    IS_FIRST: tl.constexpr,
    IS_MASS: tl.constexpr,
):
    """Find one digit of the threshold from how many tokens have each value of it.

    limit: top_k, or top_p where IS_MASS: the last digit of a mass search, where a value is one logit with one
    weight.
    """
    batch_row, _, is_drawn, logits, state = locate_row(
        logits_ptr, state_ptr, is_node_ptr, num_nodes, row_stride, node_stride, EVERY
    )
    if is_drawn:
        temperature = tl.load(temperature_ptr + batch_row * temperature_stride)
        peak_key = tl.load(state + PEAK).to(tl.uint32)
        limit = tl.load(limit_ptr + batch_row * limit_stride)
        is_limited = limit < 1.0 if IS_MASS else limit < vocab_size
        if (temperature > 0) & is_finite_key(peak_key) & is_limited:
            prefix = tl.load(state + PREFIX).to(tl.uint32)
            counts = tl.zeros([256], tl.int32)
            split = tl.program_id(1)
            for start in range(0, CHUNK, BLOCK):
                token_id = split * CHUNK + start + tl.arange(0, BLOCK)
                is_token = token_id < vocab_size
                x = tl.load(logits + token_id.to(tl.int64) * stride, is_token, 0.0)
                key = ordered_key(x.to(tl.float32)) >> KEY_SHIFT
                is_open = is_token
                if not IS_FIRST:
                    is_open = is_open & (key >> SHIFT + BITS == prefix)
                if tl.max(is_open.to(tl.int32), 0) > 0:
                    digit = (key >> SHIFT & (1 << BITS) - 1).to(tl.int32)
                    counts += tl.histogram(digit, 256, mask=is_open)
            values = tl.arange(0, 256)
            tl.atomic_add(state + BINS + values, counts.to(tl.int64), counts > 0, sem="relaxed")
            num_splits = tl.num_programs(1)
            if SHIFT == 0:
                row_ties = tie_counts_ptr + (tl.program_id(0).to(tl.int64) * num_splits + split) * NUM_BINS
                tl.store(row_ties + values, counts)
            if is_last_program(state + NUM_DONE, num_splits):
                mass = tl.load(state + BINS + values, cache_modifier=".cg")
                tl.store(state + BINS + values, tl.zeros([256], tl.int64))
                weight = tl.full([256], 1, tl.int64)
                budget = tl.load(state + BUDGET) if IS_MASS else limit.to(tl.int64)
                if IS_MASS:
                    keys = (prefix << BITS) + values.to(tl.uint32)
                    floor = tl.load(state + THRESHOLD)
                    wide = keys.to(tl.int64)
                    mass = tl.where(wide == floor, tl.load(state + NUM_TIES), tl.where(wide > floor, mass, 0))
                    number = number_of_key(keys, KEY_SHIFT)
                    weight = _integer_weight(number, number_of_key(peak_key), temperature)
                    weight = tl.where(mass > 0, weight, 0)
                    mass *= weight
                _choose_digit(state, mass, weight, budget, prefix, values, BITS, SHIFT == 0)


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
    logits_ptr,
    state_ptr,
    is_node_ptr,
    num_nodes,
    vocab_size,
    row_stride,
    node_stride,
    stride,
    temperature_ptr,
    temperature_stride,
    top_p_ptr,
    top_p_stride,
    EVERY: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    IS_FIRST: tl.constexpr,
):
    """Find one digit of the threshold of top-p from the weight of the tokens with each value of it."""
    batch_row, _, is_drawn, logits, state = locate_row(
        logits_ptr, state_ptr, is_node_ptr, num_nodes, row_stride, node_stride, EVERY
    )
    if is_drawn:
        temperature = tl.load(temperature_ptr + batch_row * temperature_stride)
        top_p = tl.load(top_p_ptr + batch_row * top_p_stride)
        peak_key = tl.load(state + PEAK).to(tl.uint32)
        if (temperature > 0) & is_finite_key(peak_key) & (top_p < 1.0):
            peak = number_of_key(peak_key)
            prefix = tl.load(state + PREFIX).to(tl.uint32)
            # Ties on the floor of top-k are weighed once, by the last program.
            floor = tl.load(state + THRESHOLD).to(tl.uint32)
            values = tl.arange(0, 1 << BITS)
            mass = tl.zeros([1 << BITS], tl.int64)
            for start in range(0, CHUNK, BLOCK):
                token_id = tl.program_id(1) * CHUNK + start + tl.arange(0, BLOCK)
                is_token = token_id < vocab_size
                x = tl.load(logits + token_id.to(tl.int64) * stride, is_token, -float("inf")).to(tl.float32)
                key = ordered_key(x) >> KEY_SHIFT
                is_open = is_token & (key > floor)
                if not IS_FIRST:
                    is_open = is_open & (key >> SHIFT + BITS == prefix)
                weight = tl.where(is_open, _integer_weight(x, peak, temperature), 0)
                if tl.max(weight, 0) > 0:
                    digit = (key >> SHIFT & (1 << BITS) - 1).to(tl.int32)
                    mass += tl.sum(tl.where(digit[None, :] == values[:, None], weight[None, :], 0), 1)
            tl.atomic_add(state + BINS + values, mass, mass > 0, sem="relaxed")
            if is_last_program(state + NUM_DONE, tl.num_programs(1)):
                mass = tl.load(state + BINS + values, cache_modifier=".cg")
                tl.store(state + BINS + values, tl.zeros([1 << BITS], tl.int64))
                num_ties = tl.load(state + NUM_TIES)
                if num_ties > 0:
                    tied = num_ties * _integer_weight(number_of_key(floor, KEY_SHIFT), peak, temperature)
                    is_floor = values == (floor >> SHIFT & (1 << BITS) - 1).to(tl.int32)
                    if not IS_FIRST:
                        is_floor = is_floor & (floor >> SHIFT + BITS == prefix)
                    mass += tl.where(is_floor, tied, 0)
                if IS_FIRST:
                    share = top_p.to(tl.float64) * tl.sum(mass, 0).to(tl.float64)
                    budget = share.to(tl.int64)
                    budget += (budget.to(tl.float64) < share).to(tl.int64)
                    tl.store(state + BUDGET, budget)
                else:
                    budget = tl.load(state + BUDGET)
                _choose_digit(state, mass, mass, budget, prefix, values, BITS, False)
