"""What a collected step did and cost: the evidence of the dispatcher and the counters.

What follows from it is left to them.
"""

from dataclasses import dataclass

from engine.batch import NUM_RANKS, DecodeRow, Load, RowResult, StepPlan, StepResult
from engine.row_kind import ANY_KIND, RowKind
from engine.tree.topology import TreeTopology


@dataclass(frozen=True, slots=True)
class RowStats:
    """One decode row of a collected step; `num_accepted` counts drafts, before any stop rule cut them, and
    `path_ranks` are their ranks from the root down. `next_rank` and `num_ranks` are those of `RowResult`;
    `kind` and `sequence_idx` are those of `DecodeRow`.
    """

    topology: TreeTopology
    num_accepted: int
    path_ranks: tuple[int, ...] = ()
    next_rank: int | None = None
    num_ranks: int = NUM_RANKS
    kind: RowKind = ANY_KIND
    sequence_idx: int = 0


@dataclass(frozen=True, slots=True)
class StepStats:
    """What a collected step did and cost: the dispatcher's evidence. `load` is what it was chosen by."""

    step_idx: int
    load: Load
    rows: tuple[RowStats, ...]
    num_prefill_tokens: int
    seconds: float

    @staticmethod
    def of(plan: StepPlan, load: Load, result: StepResult) -> "StepStats":
        """Return what `plan`, chosen by `load`, turned out to do."""
        rows = tuple(map(_row_stats, plan.rows, result.rows))
        num_prefill = sum(len(chunk.token_ids) for chunk in plan.chunks)
        return StepStats(plan.step_idx, load, rows, num_prefill, result.seconds)


def _row_stats(row: DecodeRow, answer: RowResult) -> RowStats:
    ranks = row.topology.ranks
    return RowStats(
        topology=row.topology,
        num_accepted=len(answer.token_ids) - 1,
        path_ranks=tuple([ranks[node] for node in answer.path]),
        next_rank=answer.next_rank,
        num_ranks=answer.num_ranks,
        kind=row.kind,
        sequence_idx=row.sequence_idx,
    )
