"""Turns the target's logits at one node into the logits its token is drawn from.

Which tokens truncation keeps is left to `truncation`; temperature and noise are left to `sampler`.
"""

import math

import torch
from torch import Tensor

from engine.sampling.truncation import truncation_mask
from engine.speculation import SamplingTensors


def warp(logits: Tensor, sampling: SamplingTensors, output_counts: Tensor, position: Tensor) -> Tensor:
    """Return [B, V] float32 with -inf at tokens that may not be drawn.

    logits: [B, V] of any float dtype and stride, left unchanged (the answer may share their memory).
    output_counts: [B, V] int32, the tokens emitted before `position`: [B] int64, where the drawn token will
    sit. In order: logit bias, repetition penalty over prompt and output, frequency and presence penalty over
    the output, stop tokens masked before `stop_from`, then top-k, top-p and min-p of softmax(logits /
    temperature). The logits are not divided by the temperature: the draw is argmax(logits + temperature *
    gumbel), exact at 0. NaN stays NaN.
    """
    warped = logits.float()
    if sampling.is_biased:
        warped = warped.scatter_add(1, sampling.bias_token_ids, sampling.bias_values)
    if sampling.is_penalized:
        warped = _penalize(warped, sampling, output_counts)
    if sampling.has_min_tokens:
        warped = _mask_stops(warped, sampling, position)
    if sampling.is_truncated:
        warped = warped.masked_fill(~truncation_mask(warped, sampling), -math.inf)
    return warped


def _penalize(logits: Tensor, sampling: SamplingTensors, output_counts: Tensor) -> Tensor:
    """Divide positive and multiply negative logits of seen tokens (arXiv 1909.05858), then subtract the
    frequency penalty per emission and the presence penalty once.
    """
    is_emitted = output_counts > 0
    repetition = sampling.repetition_penalty[:, None]
    penalized = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalized = torch.where(is_emitted | sampling.prompt_mask, penalized, logits)
    penalized -= sampling.frequency_penalty[:, None] * output_counts
    penalized -= sampling.presence_penalty[:, None] * is_emitted
    return penalized


def _mask_stops(logits: Tensor, sampling: SamplingTensors, position: Tensor) -> Tensor:
    is_masked = (sampling.stop_token_ids >= 0) & (position < sampling.stop_from)[:, None]
    # Adding, not writing: a padded id points at token 0 too, and adds 0 there whatever the order.
    offset = torch.zeros_like(sampling.stop_token_ids, dtype=torch.float32).masked_fill_(is_masked, -math.inf)
    return logits.scatter_add(1, sampling.stop_token_ids.clamp(min=0), offset)
