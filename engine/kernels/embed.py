"""Tokens looked up, normalised and given their angles, in one launch: what a network's first layer reads.

Numbers are rounded as in `norm`. Choosing this kernel is left to `layers/triton_ops`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.norm import scaled, warps_of_row


def embed_rms_norm(
    token_ids: Tensor, positions: Tensor, rows: Tensor, table: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (normed [T, H], embedded, angles [T, A]) of token_ids and positions [T] int64.

    embedded: [T, 2 * H], as `norm.add_rms_norm` takes it, or [T, H] where rows are float32.

    rows: [V, H], where an id below 0 reads row 0; table: [P, A]; weight: [H]. It waits for the
    launch before: it is the first of a pass, after whatever made the tokens.
    """
    num_tokens, size, angle_size = token_ids.shape[0], rows.shape[1], table.shape[1]
    for x in (token_ids, positions, rows, table):
        assert x.is_contiguous(), x.stride()
    normed = rows.new_empty(num_tokens, size)
    is_split = rows.dtype != torch.float32
    embedded = rows.new_empty(num_tokens, 2 * size if is_split else size)
    angles = torch.empty(num_tokens, angle_size, dtype=table.dtype, device=table.device)
    block = triton.next_power_of_2(size)
    _embed_kernel[(num_tokens, 2)](
        *(token_ids, positions, rows, table, weight, normed, embedded, angles, size, angle_size, eps),
        BLOCK=block,
        BLOCK_ANGLES=triton.next_power_of_2(angle_size),
        IS_SPLIT=is_split,
        num_warps=warps_of_row(block),
    )
    return normed, embedded, angles


@triton.jit
def copy_angles(table, out, position, size, BLOCK: tl.constexpr) -> None:
    """Copy the row of a position to `out`."""
    idx = tl.arange(0, BLOCK)
    tl.store(out + idx, tl.load(table + position * size + idx, idx < size), idx < size)


@triton.jit
def _embed_kernel(
    token_ids,
    positions,
    rows,
    table,
    weight,
    normed,
    embedded,
    angles,
    size,
    angle_size,
    eps,
    BLOCK: tl.constexpr,
    BLOCK_ANGLES: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if part == 0:
        element = tl.arange(0, BLOCK)
        is_element = element < size
        scale = tl.load(weight + element, is_element, 0.0).to(tl.float32)
        token_id = tl.maximum(tl.load(token_ids + token), 0)
        values = tl.load(rows + token_id * size + element, is_element, 0.0)
        out = embedded + token * (2 * size if IS_SPLIT else size) + element
        tl.store(out, values, is_element)
        if IS_SPLIT:
            tl.store(out + size, tl.zeros_like(values), is_element)
        result = scaled(values.to(tl.float32), scale, size, eps)
        tl.store(normed + token * size + element, result.to(normed.dtype.element_ty), is_element)
    else:
        position = tl.load(positions + token)
        copy_angles(table, angles + token * angle_size, position, angle_size, BLOCK_ANGLES)
