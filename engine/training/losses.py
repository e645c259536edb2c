"""The losses of draft training, each with its gradient computed on the way.

Which rows count, and how much, is left to the trainer.
"""

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
    """L = cross_entropy * CE(target, draft) + smooth_l1 * SmoothL1(target hidden, draft hidden).

    The paper (arXiv 2508.08192) uses 0.1 and 1.0 for heads that read the last feature only; a head over
    several taps trains on cross entropy alone (arXiv 2503.01840).
    """

    cross_entropy: float = 1.0
    smooth_l1: float = 0.0

    def __post_init__(self) -> None:
        if min(self.cross_entropy, self.smooth_l1) < 0 or self.cross_entropy + self.smooth_l1 <= 0:
            raise ConfigError(f"loss weights must be 0 or more, and not both 0, found {self}")


def soft_cross_entropy(
    hidden: Tensor, head_rows: Tensor, teacher: Tensor, weights: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (loss, ranks): the weighted sum of -sum_v p_v log q_v, q = softmax(hidden @ head_rows^T).

    hidden: [T, H]; head_rows: [V, H], which gets no gradient; teacher: [T, V], the target's p over the draft
    vocabulary; weights: [T] float32; labels: [T] int64 draft ids, -1 where the draft has none. loss is a
    float32 scalar, ranks [T] int64 is the rank of the label among the logits, V for label -1. Logits live for
    one chunk of rows at a time.
    """
    compute = _LinearSoftCrossEntropy.apply
    loss, ranks = compute(hidden, head_rows, teacher, weights, labels)  # type: ignore[no-untyped-call]
    return loss, ranks


class _LinearSoftCrossEntropy(torch.autograd.Function):
    """d loss / d logits is w (q - p) where p sums to 1, so backward needs no second pass over the logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head_rows: Tensor, teacher: Tensor, weights: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        core = fused(_chunk_loss, hidden.device)
        gradient = torch.empty_like(hidden)
        losses, ranks = [], []
        for start in range(0, hidden.shape[0], _CHUNK):
            rows = slice(start, start + _CHUNK)
            logits = F.linear(hidden[rows], head_rows)
            loss, logit_gradient, rank = core(logits, teacher[rows], weights[rows], labels[rows])
            gradient[rows] = logit_gradient @ head_rows
            losses.append(loss.sum())
            ranks.append(rank)
        rank = torch.cat(ranks)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(rank)
        return torch.stack(losses).sum(), rank

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None, None


def _chunk_loss(
    logits: Tensor, teacher: Tensor, weights: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (loss [T] float32, d loss / d logits [T, V] in the logits' dtype, rank of the label [T])."""
    scores = logits.float()
    p = teacher.float()
    log_q = scores - scores.logsumexp(dim=-1, keepdim=True)
    loss = -(p * log_q).sum(-1) * weights
    gradient = (log_q.exp() * p.sum(-1, keepdim=True) - p) * weights[:, None]
    label_score = scores.gather(1, labels.clamp(min=0)[:, None])
    rank = (scores > label_score).sum(-1)
    return loss, gradient.to(logits.dtype), torch.where(labels < 0, logits.shape[-1], rank)


def smooth_l1(hidden: Tensor, target_hidden: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum over rows of the mean SmoothL1 distance, a float32 scalar.

    hidden, target_hidden: [T, H]; weights: [T] float32.
    """
    distance = F.smooth_l1_loss(hidden.float(), target_hidden.float(), reduction="none").mean(-1)
    return (distance * weights).sum()
