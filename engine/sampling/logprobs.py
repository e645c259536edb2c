"""Scores rows of raw logits: the log-probability of a token, and the likeliest tokens with theirs.

Which rows are scored, and for whom, is left to `runner/logprobs`.
"""

import torch
from torch import Tensor


def score(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Return [R, 1 + K] float32, log_softmax(logits) at `token_ids` and at the K largest, falling; and the
    ids [R, K] int64 of those, K = min(num_top, V).

    logits: [R, V] of any float dtype; token_ids: [R] int64.
    """
    logits = logits.float()
    best = _rank_keys(logits).topk(min(num_top, logits.shape[1])).indices
    found = logits.gather(1, torch.cat((token_ids[:, None], best), dim=1))
    return found - logits.logsumexp(-1, keepdim=True), best


def _rank_keys(logits: Tensor) -> Tensor:
    """Return [R, V] float64 in the order of the logits, and of ids where they tie, as 16-bit ones often do:
    the draw takes the lowest id too.

    An id shifts its logit by less than a quarter of the distance between two float32 numbers.
    """
    keys = logits.double().clamp_(min=torch.finfo(torch.float32).min)
    token_ids = torch.arange(logits.shape[1], dtype=torch.float64, device=logits.device)
    return keys.sub_(keys.abs() * (token_ids * 2.0**-43))
