"""What a collected step did and cost: the evidence of the dispatcher and the counters.

What follows from it is left to them.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from engine.batch import NUM_RANKS, Load, StepPlan, StepResult
from engine.row_kind import ANY_KIND, RowKind
from engine.tree.topology import TreeTopology

_Verdict = tuple[TreeTopology, RowKind, tuple[int, ...], int | None, int]


class RowStats(NamedTuple):
    """Decode rows of a collected step that did the same: of a large batch only a few did not.

    `num_accepted` counts drafts of each, before any stop rule cut them, and `path_ranks` are their ranks from
    the root down. `next_rank` and `num_ranks` are those of `RowResult`, `kind` that of `DecodeRow`, and
    `sequence_idxs` says whose rows they are.
    """

    topology: TreeTopology
    num_accepted: int
    path_ranks: tuple[int, ...] = ()
    next_rank: int | None = None
    num_ranks: int = NUM_RANKS
    kind: RowKind = ANY_KIND
    sequence_idxs: tuple[int, ...] = (0,)

    @property
    def num_rows(self) -> int:
        return len(self.sequence_idxs)


@dataclass(frozen=True, slots=True)
class StepStats:
    """What a collected step did and cost: the dispatcher's evidence. `load` is what it was chosen by."""

    step_idx: int
    load: Load
    rows: tuple[RowStats, ...]
    num_prefill_tokens: int
    seconds: float

    @property
    def num_rows(self) -> int:
        return sum([row.num_rows for row in self.rows])

    @staticmethod
    def of(plan: StepPlan, load: Load, result: StepResult) -> "StepStats":
        """Return what `plan`, chosen by `load`, turned out to do."""
        alike: dict[_Verdict, list[int]] = defaultdict(list)
        for row, answer in zip(plan.rows, result.rows, strict=True):
            verdict = (row.topology, row.kind, answer.path, answer.next_rank, answer.num_ranks)
            alike[verdict].append(row.sequence_idx)
        rows = tuple([_row_stats(*verdict, tuple(idxs)) for verdict, idxs in alike.items()])
        num_prefill = sum([len(chunk.token_ids) for chunk in plan.chunks])
        return StepStats(plan.step_idx, load, rows, num_prefill, result.seconds)


def _row_stats(
    topology: TreeTopology,
    kind: RowKind,
    path: tuple[int, ...],
    next_rank: int | None,
    num_ranks: int,
    sequence_idxs: tuple[int, ...],
) -> RowStats:
    ranks = tuple([topology.ranks[node] for node in path])
    return RowStats(topology, len(path), ranks, next_rank, num_ranks, kind, sequence_idxs)
