"""Log-probabilities of emitted tokens, read from the target's raw logits where a row asks for them.

They ride beside the step's answer: what is drawn, kept and cached does not depend on them. Bringing them to
the host is left to `runner/step_handle`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import Admission, RowResult
from engine.logprobs import TokenLogprob
from engine.speculation import Verification, upload


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """What R of a step's rows asked for: `row_idxs` says which rows, `num_top` how many of the likeliest.

    values: [R, L, 1 + K] float32, at each of L = D + 1 levels the emitted token's, then the K largest in
    falling order. token_ids: [R, L, K] int64, whose they are. A level that emitted nothing means nothing.
    """

    row_idxs: tuple[int, ...]
    num_top: tuple[int, ...]
    values: Tensor
    token_ids: Tensor

    def moved(self, move: Callable[[Tensor], Tensor]) -> "LogprobRows":
        """Return the same with both tensors moved."""
        return dataclasses.replace(self, values=move(self.values), token_ids=move(self.token_ids))

    def join(self, rows: Sequence[RowResult]) -> tuple[RowResult, ...]:
        """Return the results of a step's rows, with what was asked for; the tensors are on the host."""
        joined = list(rows)
        values: list[list[list[float]]] = self.values.tolist()
        token_ids: list[list[list[int]]] = self.token_ids.tolist()
        asked = zip(self.row_idxs, self.num_top, values, token_ids, strict=True)
        for row_idx, num_top, row_values, row_ids in asked:
            row = joined[row_idx]
            levels = zip(row_values, row_ids, row.token_ids, strict=False)  # the row may end before the step
            logprobs = tuple(
                TokenLogprob(first, tuple(zip(best[:num_top], rest, strict=False)))
                for (first, *rest), best, _ in levels
            )
            joined[row_idx] = dataclasses.replace(row, logprobs=logprobs)
        return tuple(joined)


class LogprobReader:
    """Knows which slots ask; a step without one does no work here."""

    def __init__(self) -> None:
        self._num_top: dict[int, int] = {}  # of the slots whose last owner asked

    def admit(self, admission: Admission) -> None:
        """Note what the new owner of a slot asks for."""
        self._num_top.pop(admission.slot, None)
        if admission.sampling.num_logprobs is not None:
            self._num_top[admission.slot] = admission.sampling.num_logprobs

    def read(self, slots: Sequence[int], logits: Tensor, verification: Verification) -> LogprobRows | None:
        """Return what the rows `slots` of a step ask for; None where none does.

        logits: [B, N, V], of every node; there may be more rows of padding. Enqueues a few launches a level
        on the device and waits for nothing.
        """
        asking = [(idx, self._num_top[slot]) for idx, slot in enumerate(slots) if slot in self._num_top]
        if not asking:
            return None
        row_idxs, num_top = zip(*asking, strict=True)
        rows = upload(row_idxs, torch.int64, logits.device)
        path, token_ids = verification.path[rows], verification.token_ids[rows].clamp(min=0)
        # Level by level, as the walk itself: all at once would need the memory of all their vocabularies.
        levels = [
            score(logits[rows, path[:, level]], token_ids[:, level], max(num_top))
            for level in range(path.shape[1])
        ]
        values, best = (torch.stack(parts, 1) for parts in zip(*levels, strict=True))
        return LogprobRows(row_idxs, num_top, values, best)


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
