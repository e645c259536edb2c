"""Attention over packed documents without a cache: what training passes a network as `Attend`.

A query sees the keys of its own document up to itself and, in a training-time test, the diagonal keys of its
own draft steps. Which keys those are is left to `unroll`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.layers.decoder import Attend
from engine.layers.rotary import Angles, rotate_qkv
from engine.training.fusion import fused

Diagonal = tuple[Tensor, Tensor]  # k, v [T, Hkv, D] of one draft step: token t sees row t alone


@dataclass(frozen=True, slots=True)
class Documents:
    """Where documents begin in T flat tokens. offsets: [C + 1] int32 from 0 to T; max_length is a host
    bound on their lengths.
    """

    offsets: Tensor
    max_length: int

    @staticmethod
    def from_positions(positions: Tensor, max_length: int) -> "Documents":
        """Build from positions [T] int64, 0 at every first token. Synchronizes: call it on the host side."""
        starts = torch.nonzero(positions == 0)[:, 0]
        end = torch.full((1,), positions.shape[0], device=positions.device)
        return Documents(torch.cat((starts, end)).int(), max_length)


def attend_documents(documents: Documents, num_kv_heads: int) -> Attend:
    """Return the `Attend` of a network that runs over whole documents at once."""

    def attend(layer_idx: int, qkv: Tensor, angles: Angles) -> Tensor:  # noqa: ARG001
        return attend_packed(*rotate_qkv(qkv, angles, num_kv_heads), (), documents)

    return attend


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, diagonals: Sequence[Diagonal], documents: Documents
) -> Tensor:
    """Return [T, Hq, D] of q [T, Hq, D] over k, v [T, Hkv, D], causal inside each document, and over
    `diagonals`. Differentiable in every tensor.

    Half precision on CUDA runs FlashAttention; elsewhere scores are dense, [Hq, n, n] for a document of n.
    """
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        flat = (tensor for pair in diagonals for tensor in pair)
        merge = _FlashWithDiagonals.apply
        attended: Tensor = merge(documents, q, k, v, *flat)  # type: ignore[no-untyped-call]
        return attended
    if q.is_cuda:
        return attend_dense(q, k, v, diagonals, documents)
    return _attend_each(q, k, v, diagonals, documents)


def _attend_each(
    q: Tensor, k: Tensor, v: Tensor, diagonals: Sequence[Diagonal], documents: Documents
) -> Tensor:
    """Run `attend_dense` on one document at a time, whose scores are few; lengths are read by the host."""
    attended, start = [], 0
    for length in documents.offsets.diff().tolist():
        rows = slice(start, start + length)
        own = [(key[rows], value[rows]) for key, value in diagonals]
        alone = Documents(torch.tensor([0, length]), length)
        attended.append(attend_dense(q[rows], k[rows], v[rows], own, alone))
        start += length
    return torch.cat(attended)


def attend_dense(
    q: Tensor, k: Tensor, v: Tensor, diagonals: Sequence[Diagonal], documents: Documents
) -> Tensor:
    """Return what `attend_packed` does, by dense scores in float32: the reference of every faster way."""
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // k.shape[1]
    grouped = q.float().view(num_tokens, -1, group, head_dim) * head_dim**-0.5  # [T, Hkv, G, D]
    place = torch.arange(num_tokens, device=q.device)
    lengths = documents.offsets.diff()
    first = documents.offsets[:-1].repeat_interleave(lengths)  # the first token of each token's document
    is_seen = (place[None] <= place[:, None]) & (place[None] >= first[:, None])
    scores = torch.einsum("tkgd,skd->kgts", grouped, k.float()).masked_fill(~is_seen, -torch.inf)
    own = [torch.einsum("tkgd,tkd->kgt", grouped, key.float())[..., None] for key, _ in diagonals]
    weights = torch.cat((scores, *own), dim=-1).softmax(dim=-1)
    attended = torch.einsum("kgts,skd->tkgd", weights[..., :num_tokens], v.float())
    for idx, (_, value) in enumerate(diagonals):
        attended = attended + torch.einsum("kgt,tkd->tkgd", weights[..., num_tokens + idx], value.float())
    return attended.flatten(1, 2).to(q.dtype)


class _FlashWithDiagonals(torch.autograd.Function):
    """FlashAttention over the document, merged with the diagonal keys by log-sum-exp.

    FlashAttention's backward recomputes P = exp(S - lse) and dS = P * (dP - rowsum(dO * O)). Given the merged
    output and the merged lse, both are those of the joint softmax, so it returns the exact gradients of the
    document's keys, and the diagonal's follow from the same formula.
    """

    @staticmethod
    def forward(ctx: Any, documents: Documents, q: Tensor, k: Tensor, v: Tensor, *flat: Tensor) -> Tensor:
        offsets, length = documents.offsets, documents.max_length
        scale = q.shape[-1] ** -0.5
        out, lse, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(  # noqa: SLF001
            q, k, v, offsets, offsets, length, length, 0.0, True, False, scale=scale
        )
        if flat:
            out, lse = fused(_merge_diagonals, q.device)(q, out, lse, scale, *flat)
        ctx.save_for_backward(q, k, v, out, lse, rng_state, unused, offsets, *flat)
        ctx.length, ctx.scale = length, scale
        merged: Tensor = out
        return merged

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, rng_state, unused, offsets, *flat = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk, dv = torch.ops.aten._flash_attention_backward(  # noqa: SLF001
            grad, q, k, v, out, lse, offsets, offsets, ctx.length, ctx.length, 0.0, True,
            rng_state, unused, scale=ctx.scale,
        )  # fmt: skip
        if flat:
            dq, *flat = fused(_diagonal_gradients, q.device)(q, out, lse, grad, dq, ctx.scale, *flat)
        return (None, dq, dk, dv, *flat)


def _merge_diagonals(
    q: Tensor, out: Tensor, lse: Tensor, scale: float, *flat: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (out [T, Hq, D], lse [Hq, T]) after the diagonal pairs `flat` = (k_1, v_1, k_2, v_2, ...)."""
    group = q.shape[1] // flat[0].shape[1]
    total = lse
    scores = [_scores(q, k, group, scale) for k in flat[::2]]
    for score in scores:
        total = torch.logaddexp(total, score)
    merged = out.float() * (lse - total).exp().t()[..., None]
    for score, v in zip(scores, flat[1::2], strict=True):
        weight = (score - total).exp().t()[..., None]
        merged = merged + weight * _spread(v, group)
    return merged.to(out.dtype), total.contiguous()


def _diagonal_gradients(
    q: Tensor, out: Tensor, lse: Tensor, grad: Tensor, dq: Tensor, scale: float, *flat: Tensor
) -> tuple[Tensor, ...]:
    """Return (dq with the diagonals' share, dk_1, dv_1, dk_2, dv_2, ...)."""
    group = q.shape[1] // flat[0].shape[1]
    grouped = (q.shape[0], -1, group, q.shape[2])
    delta = (grad.float() * out.float()).sum(-1).t()  # [Hq, T]
    total, gradients = dq.float(), []
    for k, v in zip(flat[::2], flat[1::2], strict=True):
        weight = (_scores(q, k, group, scale) - lse).exp()
        dp = (grad.float() * _spread(v, group)).sum(-1).t()
        ds = (weight * (dp - delta) * scale).t()[..., None]  # [T, Hq, 1]
        total = total + ds * _spread(k, group)
        dk = (ds * q.float()).view(*grouped).sum(2)
        dv = (weight.t()[..., None] * grad.float()).view(*grouped).sum(2)
        gradients += [dk.to(k.dtype), dv.to(v.dtype)]
    return (total.to(dq.dtype), *gradients)


def _scores(q: Tensor, k: Tensor, group: int, scale: float) -> Tensor:
    """Return q_t . k_t of every head, [Hq, T] float32."""
    return (q.float() * _spread(k, group)).sum(-1).t() * scale


def _spread(x: Tensor, group: int) -> Tensor:
    """Return [T, Hq, D] float32: each K/V head beside the `group` query heads that share it."""
    return x.float().repeat_interleave(group, dim=1)
