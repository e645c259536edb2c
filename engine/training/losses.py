"""The losses of draft training, each with its gradient computed on the way.

Which rows count, and how much, is left to the trainer.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import ConfigError
from engine.training.fusion import fused

_CHUNK = 16384  # rows whose logits exist at a time


@dataclass(frozen=True, slots=True)
class LossWeights:
    """L = cross_entropy * CE(p, q) + acceptance * (1 - sum_v min(p_v, q_v)) + smooth_l1 * SmoothL1(h, h').

    p, q are the probabilities and h, h' the hidden states of target and draft. The paper (arXiv 2508.08192)
    uses 0.1, 0 and 1.0 for heads that read the last feature only; a head over several taps trains on cross
    entropy alone (arXiv 2503.01840). sum_v min(p_v, q_v) is the chance that a draft sampled from q is
    accepted.
    """

    cross_entropy: float = 1.0
    smooth_l1: float = 0.0
    acceptance: float = 0.0

    def __post_init__(self) -> None:
        values = (self.cross_entropy, self.smooth_l1, self.acceptance)
        if not all(0.0 <= value < math.inf for value in values) or sum(values) <= 0:
            raise ConfigError(f"loss weights must be 0 or more, and not all 0, found {self}")


def distill_logits(
    hidden: Tensor, head_rows: Tensor, teacher: Tensor, weights: Tensor, labels: Tensor, losses: LossWeights
) -> tuple[Tensor, Tensor]:
    """Return (loss, ranks): the summed loss of q = softmax(hidden @ head_rows^T) against p, SmoothL1 left
    out.

    hidden: [T, H]; head_rows: [V, H], which gets no gradient; teacher: [T, V], the target's p over the draft
    vocabulary; weights: [T] float32; labels: [T] int64 draft ids, -1 where the draft has none. loss is a
    float32 scalar, ranks [T] int64 is the rank of the label among the logits, V for label -1. Logits live for
    one chunk of rows at a time.
    """
    compute = _LinearDistillation.apply
    inputs = (hidden, head_rows, teacher, weights, labels, losses)
    loss, ranks = compute(*inputs)  # type: ignore[no-untyped-call]
    return loss, ranks


class _LinearDistillation(torch.autograd.Function):
    """The gradient at the logits is known in closed form, so backward needs no second pass over them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head_rows: Tensor,
        teacher: Tensor,
        weights: Tensor,
        labels: Tensor,
        losses: LossWeights,
    ) -> tuple[Tensor, Tensor]:
        core = fused(_chunk_loss, hidden.device)
        gradient = torch.empty_like(hidden)
        totals, ranks = [], []
        for start in range(0, hidden.shape[0], _CHUNK):
            rows = slice(start, start + _CHUNK)
            logits = F.linear(hidden[rows], head_rows)
            loss, logit_gradient, rank = core(
                logits, teacher[rows], weights[rows], labels[rows], losses.cross_entropy, losses.acceptance
            )
            gradient[rows] = logit_gradient @ head_rows
            totals.append(loss.sum())
            ranks.append(rank)
        rank = torch.cat(ranks)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(rank)
        return torch.stack(totals).sum(), rank

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None, None, None


def _chunk_loss(
    logits: Tensor, teacher: Tensor, weights: Tensor, labels: Tensor, cross_entropy: float, acceptance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (loss [T] float32, d loss / d logits [T, V] in the logits' dtype, rank of the label [T])."""
    scores = logits.float()
    p = teacher.float()
    log_q = scores - scores.logsumexp(dim=-1, keepdim=True)
    q = log_q.exp()
    # d CE / d logits = q * sum(p) - p
    loss = -cross_entropy * (p * log_q).sum(-1)
    gradient = cross_entropy * (q * p.sum(-1, keepdim=True) - p)
    if acceptance > 0:
        # d (-sum min(p, q)) / d logits = -q * (a - sum(a * q)), a = 1 where q < p
        rising = q * (q < p)
        loss = loss + acceptance * (1 - torch.minimum(p, q).sum(-1))
        gradient = gradient - acceptance * (rising - q * rising.sum(-1, keepdim=True))
    label_score = scores.gather(1, labels.clamp(min=0)[:, None])
    rank = (scores > label_score).sum(-1)
    gradient = gradient * weights[:, None]
    return loss * weights, gradient.to(logits.dtype), torch.where(labels < 0, logits.shape[-1], rank)


def smooth_l1(hidden: Tensor, target_hidden: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum over rows of the mean SmoothL1 distance, a float32 scalar.

    hidden, target_hidden: [T, H]; weights: [T] float32.
    """
    distance = F.smooth_l1_loss(hidden.float(), target_hidden.float(), reduction="none").mean(-1)
    return (distance * weights).sum()
