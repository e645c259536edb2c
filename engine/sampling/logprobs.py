"""Log-probabilities of emitted tokens, read from the target's raw logits where a row asks for them.

They ride beside the step's answer: what is drawn, kept and cached does not depend on them. Bringing them to
the host is left to `runner/step_handle`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import Admission, PrefillChunk, RowResult
from engine.logprobs import TokenLogprob
from engine.speculation import Verification, upload

_PIECE = 64  # positions of a prompt whose logits are held at once


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """What R rows of L positions asked for: `row_idxs` says which rows of the step, `num_top` how many of the
    likeliest tokens.

    values: [R, L, 1 + K] float32, at each position the logprob of the token that came, then the K largest in
    falling order. token_ids: [R, L, K] int64, whose they are.
    """

    row_idxs: tuple[int, ...]
    num_top: tuple[int, ...]
    values: Tensor
    token_ids: Tensor

    def moved(self, move: Callable[[Tensor], Tensor]) -> "LogprobRows":
        """Return the same with both tensors moved."""
        return dataclasses.replace(self, values=move(self.values), token_ids=move(self.token_ids))

    def join(self, rows: Sequence[RowResult]) -> tuple[RowResult, ...]:
        """Return the results of all rows of a step with what these asked for; the tensors are on the host."""
        joined = list(rows)
        for place, row_idx in enumerate(self.row_idxs):
            row = joined[row_idx]
            # A row may emit less than the deepest tree of the step: positions behind that mean nothing.
            joined[row_idx] = dataclasses.replace(row, logprobs=self.entries(place)[: len(row.token_ids)])
        return tuple(joined)

    def entries(self, place: int) -> tuple[TokenLogprob, ...]:
        """Return the positions of the row at `place` among these."""
        num_top = self.num_top[place]
        values: list[list[float]] = self.values[place, :, : 1 + num_top].tolist()
        token_ids: list[list[int]] = self.token_ids[place, :, :num_top].tolist()
        return tuple(
            TokenLogprob(first, tuple(zip(best, rest, strict=True)))
            for (first, *rest), best in zip(values, token_ids, strict=True)
        )


class LogprobReader:
    """Knows which slots ask; a step without one does no work here."""

    def __init__(self) -> None:
        self._num_top: dict[int, int] = {}  # of the slots whose last owner asked
        self._scoring: set[int] = set()  # slots whose last owner asked for the prompt too

    def admit(self, admission: Admission) -> None:
        """Note what the new owner of a slot asks for."""
        self._num_top.pop(admission.slot, None)
        self._scoring.discard(admission.slot)
        if admission.sampling.num_logprobs is not None:
            self._num_top[admission.slot] = admission.sampling.num_logprobs
        if admission.sampling.scores_prompt:
            self._scoring.add(admission.slot)

    def score_rows(
        self, slots: Sequence[int], logits: Tensor, verification: Verification
    ) -> LogprobRows | None:
        """Return what the decode rows `slots` of a step ask for; None where none does.

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

    def score_chunks(
        self, chunks: Sequence[PrefillChunk], hidden: Tensor, head: Callable[[Tensor], Tensor]
    ) -> tuple[LogprobRows, ...]:
        """Return one entry for each chunk that asks: the logprob of the token after each of its positions.

        hidden: [T, H], of all chunks side by side; head: [T, H] -> [T, V] logits.
        """
        scored, end = [], 0
        for idx, chunk in enumerate(chunks):
            start, end = end, end + len(chunk.token_ids)
            if chunk.slot in self._scoring:
                after = upload((*chunk.token_ids[1:], chunk.next_token_id), torch.int64, hidden.device)
                num_top = self._num_top[chunk.slot]
                pieces = [slice(first, first + _PIECE) for first in range(0, end - start, _PIECE)]
                states = hidden[start:end]
                parts = [score(head(states[piece]), after[piece], num_top) for piece in pieces]
                values, best = (torch.cat(part)[None] for part in zip(*parts, strict=True))
                scored.append(LogprobRows((idx,), (num_top,), values, best))
        return tuple(scored)


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
