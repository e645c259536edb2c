"""Top-k of logits without a sort: the best of every split in registers, then the best of those.

What the tokens are used for is left to the drafter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.ordered_key import id_of_packed, ordered_key, pack_key_and_id

MAX_K = 16
_BLOCK = 2048
_NUM_WARPS = 4


def top_k(logits: Tensor, k: int) -> Tensor:
    """Return [M, k] int64, the ids of the largest of logits [M, V], by logit falling, then id rising.

    logits: bfloat16, float16 or float32, any strides; NaN ranks first. Up to `MAX_K` takes two launches (one
    where V fits a tile); above that it is `torch.topk`, whose ties are in no order.
    """
    num_rows, vocab_size = logits.shape
    assert 1 <= k <= vocab_size, (k, vocab_size)
    if k > MAX_K:
        return logits.topk(k, dim=-1).indices
    num_splits = triton.cdiv(vocab_size, _BLOCK)
    ids = torch.empty(num_rows, k, dtype=torch.int64, device=logits.device)
    partial = torch.empty(num_rows, num_splits, k, dtype=torch.int64, device=logits.device)
    _split_kernel[(num_rows, num_splits)](
        *(logits, partial, vocab_size, *logits.stride()), K=k, BLOCK=_BLOCK, num_warps=_NUM_WARPS
    )
    block = triton.next_power_of_2(num_splits * k)
    _merge_kernel[(num_rows,)](partial, ids, num_splits * k, K=k, BLOCK=block, num_warps=1)
    return ids


@triton.jit
def _split_kernel(
    logits_ptr, partial_ptr, vocab_size, row_stride, stride, K: tl.constexpr, BLOCK: tl.constexpr
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token_id = split * BLOCK + tl.arange(0, BLOCK)
    is_token = token_id < vocab_size
    x = tl.load(logits_ptr + row * row_stride + token_id.to(tl.int64) * stride, is_token, 0.0)
    packed = tl.where(is_token, pack_key_and_id(ordered_key(x.to(tl.float32)), token_id), 0)
    out = partial_ptr + (row * tl.num_programs(1) + split) * K
    for rank in tl.static_range(K):
        highest = tl.max(packed, 0)
        tl.store(out + rank, highest)
        packed = tl.where(packed == highest, 0, packed)


@triton.jit
def _merge_kernel(partial_ptr, ids_ptr, num_partials, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    idx = tl.arange(0, BLOCK)
    packed = tl.load(partial_ptr + row * num_partials + idx, idx < num_partials, 0)
    for rank in tl.static_range(K):
        highest = tl.max(packed, 0)
        tl.store(ids_ptr + row * K + rank, id_of_packed(highest))
        packed = tl.where(packed == highest, 0, packed)
