"""Log-probabilities of what a step emitted and prefilled, for the sequences that ask.

They ride beside the step's answer: what is drawn, kept and cached does not depend on them. How a row of
logits is scored is left to `sampling/logprobs`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import Admission, DecodeRow, PrefillChunk, RowResult
from engine.logprobs import Logprobs, TokenLogprob, WantedLogprobs
from engine.runner.step_output import DecodedRows, PrefilledChunks
from engine.sampling.logprobs import score
from engine.speculation import upload

_PIECE = 64  # positions of a prompt whose logits are held at once


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """R rows of L positions: `row_idxs` says which rows or chunk of the step, `num_top` how many of the
    likeliest tokens each asks for.

    values: [R, L, 1 + K] float32, at each position the logprob of the token that came, then the K largest in
    falling order. token_ids: [R, L, K] int64, whose they are.
    """

    row_idxs: tuple[int, ...]
    num_top: tuple[int, ...]
    values: Tensor
    token_ids: Tensor

    def moved(self, move: Callable[[Tensor], Tensor]) -> "ScoredRows":
        """Return the same with both tensors moved."""
        return dataclasses.replace(self, values=move(self.values), token_ids=move(self.token_ids))

    def entries(self, place: int) -> Logprobs:
        """Return the positions of the row at `place` among these, which are on the host."""
        num_top = self.num_top[place]
        values: list[list[float]] = self.values[place, :, : 1 + num_top].tolist()
        token_ids: list[list[int]] = self.token_ids[place, :, :num_top].tolist()
        return tuple(
            TokenLogprob(first, tuple(zip(best, rest, strict=True)))
            for (first, *rest), best in zip(values, token_ids, strict=True)
        )


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """All that a step's sequences ask for: its rows at once, its chunks one by one."""

    rows: ScoredRows | None = None
    chunks: tuple[ScoredRows, ...] = ()

    def moved(self, move: Callable[[Tensor], Tensor]) -> "StepLogprobs":
        """Return the same with every tensor moved."""
        rows = None if self.rows is None else self.rows.moved(move)
        return StepLogprobs(rows, tuple(chunk.moved(move) for chunk in self.chunks))

    def join(self, results: tuple[RowResult, ...]) -> tuple[RowResult, ...]:
        """Return the results of all rows of the step with what some ask for; the tensors are on the host."""
        if self.rows is None:
            return results
        joined = list(results)
        for place, row_idx in enumerate(self.rows.row_idxs):
            row = joined[row_idx]
            # A row may emit less than the deepest tree of the step: positions behind that mean nothing.
            logprobs = self.rows.entries(place)[: len(row.token_ids)]
            joined[row_idx] = row._replace(logprobs=logprobs)
        return tuple(joined)

    def of_chunks(self) -> tuple[tuple[int, Logprobs], ...]:
        """Return what each chunk that asks is told, by its index; the tensors are on the host."""
        return tuple((chunk.row_idxs[0], chunk.entries(0)) for chunk in self.chunks)


class LogprobReader:
    """Knows which slots ask; a step without one does no work here. `head` turns hidden states into logits."""

    def __init__(self, head: Callable[[Tensor], Tensor]) -> None:
        self._head = head
        self._wanted: dict[int, WantedLogprobs] = {}  # of the slots whose last owner asked

    def admit(self, admission: Admission) -> None:
        """Note what the new owner of a slot asks for."""
        self._wanted.pop(admission.slot, None)
        if admission.sampling.logprobs is not None:
            self._wanted[admission.slot] = admission.sampling.logprobs

    def read(
        self,
        rows: Sequence[DecodeRow],
        decoded: DecodedRows | None,
        chunks: Sequence[PrefillChunk],
        prefilled: PrefilledChunks | None,
    ) -> StepLogprobs:
        """Return what a step's rows and chunks ask for. Enqueues work on the device and waits for nothing."""
        return StepLogprobs(
            rows=None if decoded is None else self._score_rows(rows, decoded),
            chunks=() if prefilled is None else self._score_chunks(chunks, prefilled.hidden),
        )

    def _score_rows(self, rows: Sequence[DecodeRow], decoded: DecodedRows) -> ScoredRows | None:
        """Score every token of the path of each row that asks, in a few launches a level."""
        asking = [(idx, self._wanted[row.slot]) for idx, row in enumerate(rows) if row.slot in self._wanted]
        if not asking:
            return None
        row_idxs, num_top = zip(*((idx, wanted.num_top) for idx, wanted in asking), strict=True)
        places = upload(row_idxs, torch.int64, decoded.logits.device)
        path = decoded.verification.path[places]
        token_ids = decoded.verification.token_ids[places].clamp(min=0)
        # Level by level, as the walk itself: all at once would need the memory of all their vocabularies.
        levels = [
            score(decoded.logits[places, path[:, level]], token_ids[:, level], max(num_top))
            for level in range(path.shape[1])
        ]
        values, best = (torch.stack(parts, 1) for parts in zip(*levels, strict=True))
        return ScoredRows(row_idxs, num_top, values, best)

    def _score_chunks(self, chunks: Sequence[PrefillChunk], hidden: Tensor) -> tuple[ScoredRows, ...]:
        """Score the token after each position of the chunks whose prompts are to be scored; hidden: [T, H],
        of all chunks side by side.
        """
        scored, end = [], 0
        for idx, chunk in enumerate(chunks):
            start, end = end, end + len(chunk.token_ids)
            wanted = self._wanted.get(chunk.slot)
            if wanted is not None and wanted.scores_prompt:
                scored.append(self._score_chunk(idx, chunk, hidden[start:end], wanted.num_top))
        return tuple(scored)

    def _score_chunk(self, idx: int, chunk: PrefillChunk, hidden: Tensor, num_top: int) -> ScoredRows:
        after = upload((*chunk.token_ids[1:], chunk.next_token_id), torch.int64, hidden.device)
        pieces = [slice(first, first + _PIECE) for first in range(0, len(hidden), _PIECE)]
        parts = [score(self._head(hidden[piece]), after[piece], num_top) for piece in pieces]
        values, best = (torch.cat(part)[None] for part in zip(*parts, strict=True))
        return ScoredRows((idx,), (num_top,), values, best)
