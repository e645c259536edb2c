"""Top-k of logits without a sort: the best of every split in registers, then the best of those.

What the tokens are used for is left to the drafter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.ordered_key import ID_BITS, ID_MASK, id_of_packed, ordered_key, pack_key_and_id

MAX_K = 16
_BLOCK = 2048
# Keys of short floats leave room in 32 bits for an index into the tile.
_INDEX_BITS = tl.constexpr(11)
_IDLE_KEY_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


def top_k(logits: Tensor, k: int, *, overlap: bool = False) -> Tensor:
    """Return [M, k] int64, the ids of the largest of logits [M, V], by logit falling, then id rising.

    logits: bfloat16, float16 or float32, any strides; NaN ranks first. Two launches, and with `overlap`
    (compute capability 9 and up) the second comes near while the first still runs. Above `MAX_K` it is
    `torch.topk`, whose ties are in no order.
    """
    leaders = find_leaders(logits, k, overlap=overlap)
    num_rows, num_leaders = leaders.shape
    token_ids = torch.empty(num_rows, k, dtype=torch.int64, device=logits.device)
    _merge_kernel[(num_rows,)](
        *(leaders, token_ids, num_leaders),
        K=k,
        BLOCK=triton.next_power_of_2(num_leaders),
        OVERLAP=overlap,
        num_warps=1,
        launch_pdl=overlap,
    )
    return token_ids


def find_leaders(logits: Tensor, k: int, *, overlap: bool = False) -> Tensor:
    """Return [M, L] int64, packed tokens of logits [M, V]: the k largest are the answer of `top_k`."""
    num_rows, vocab_size = logits.shape
    assert 1 <= k <= vocab_size, (k, vocab_size)
    if k > MAX_K:
        token_ids = logits.topk(k, dim=-1).indices
        order = torch.arange(k, 0, -1, device=logits.device)
        return torch.bitwise_or(order << ID_BITS.value, token_ids ^ ID_MASK.value)
    num_splits = triton.cdiv(vocab_size, _BLOCK)
    leaders = torch.empty(num_rows, num_splits * k, dtype=torch.int64, device=logits.device)
    _split_kernel[(num_rows, num_splits)](
        *(logits, leaders, vocab_size, *logits.stride()),
        K=k,
        KEY_SHIFT=_IDLE_KEY_BITS[logits.dtype],
        BLOCK=_BLOCK,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return leaders


@triton.jit
def _split_kernel(
    logits_ptr,
    leaders_ptr,
    vocab_size,
    row_stride,
    token_stride,
    K: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the packed best K of one tile, highest first, 0 where it holds fewer."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    idx = tl.arange(0, BLOCK)
    token_id = split * BLOCK + idx
    is_token = token_id < vocab_size
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(logits_ptr + row * row_stride + token_id.to(tl.int64) * token_stride, is_token, 0.0)
    key = ordered_key(x.to(tl.float32))
    if KEY_SHIFT >= _INDEX_BITS:
        packed = key >> KEY_SHIFT << _INDEX_BITS | (BLOCK - 1 - idx).to(tl.uint32)
    else:
        packed = pack_key_and_id(key, token_id)
    packed = tl.where(is_token, packed, 0)
    out = leaders_ptr + (row * tl.num_programs(1) + split) * K
    for rank in tl.static_range(K):
        highest = tl.max(packed, 0)
        packed = tl.where(packed == highest, 0, packed)
        if KEY_SHIFT >= _INDEX_BITS:
            found = split * BLOCK + BLOCK - 1 - (highest & BLOCK - 1).to(tl.int32)
            wide = pack_key_and_id(highest >> _INDEX_BITS, found)
            tl.store(out + rank, tl.where(highest > 0, wide, 0))
        else:
            tl.store(out + rank, highest)


@triton.jit
def _merge_kernel(
    leaders_ptr, token_ids_ptr, num_leaders, K: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """Write the ids of the best K of one row's leaders."""
    row = tl.program_id(0).to(tl.int64)
    idx = tl.arange(0, BLOCK)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    packed = tl.load(leaders_ptr + row * num_leaders + idx, idx < num_leaders, 0)
    for rank in range(K):
        highest = tl.max(packed, 0)
        tl.store(token_ids_ptr + row * K + rank, id_of_packed(highest))
        packed = tl.where(packed == highest, 0, packed)
