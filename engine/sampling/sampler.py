"""Draws tokens with keyed Gumbel noise: one from the target's warped logits, or several from the draft's.

Warping is left to `warp`; what a drawn token means for a tree is left to `verify`.
"""

import torch
from torch import Tensor

from engine.sampling.noise import Stream, gumbel
from engine.speculation import SamplingTensors


def draw(masked_logits: Tensor, sampling: SamplingTensors, position: Tensor) -> Tensor:
    """Return token ids [B] int64, each distributed as softmax(masked_logits / temperature).

    masked_logits: [B, V] float32; position: [B] int64, where the token will sit. Gumbel-max: argmax(logits +
    temperature * noise), so a temperature of 0 is the exact argmax, the lowest id on ties. The token is a
    function of its row alone. A row of NaN gives some valid id.
    """
    if not sampling.is_sampled:
        return masked_logits.argmax(-1)
    noise = gumbel(sampling.seed, position, masked_logits.shape[-1], Stream.TARGET)
    return noise.mul_(sampling.temperature[:, None]).add_(masked_logits).argmax(-1)


def best_children(logits: Tensor, count: int) -> Tensor:
    """Return [B, count] int64, the ids of the largest logits [B, V], largest first."""
    if logits.is_cuda:
        from engine.kernels.topk import top_k

        return top_k(logits, count)
    return logits.topk(count, dim=-1).indices


def sample_children(log_q: Tensor, count: int, seed: Tensor, position: Tensor) -> Tensor:
    """Return [B, count] int64 tokens drawn from softmax(log_q) without replacement, in draw order.

    log_q: [B, V] float32, unnormalised is fine; seed and position: [B] int64, where the children will sit.
    Gumbel top-k (arXiv 1903.06059) on the draft's own stream, independent of the verifier's. Where fewer than
    `count` tokens have a probability, the rest is -1.
    """
    assert count <= log_q.shape[-1], (count, log_q.shape)
    scores, token_ids = gumbel(seed, position, log_q.shape[-1], Stream.DRAFT).add_(log_q).topk(count)
    return torch.where(scores.isfinite(), token_ids, -1)
