"""What is told of a step: rows that did the same are told once, with whose they are."""

from engine.batch import DecodeRow, Load, PrefillChunk, RowResult, StepPlan, StepResult
from engine.row_kind import RowKind
from engine.step_stats import RowStats, StepStats
from engine.tree.topology import TreeTopology, root_only

PLAIN, TREE = root_only(), TreeTopology("tree", (-1, 0, 0, 1))
GREEDY, SAMPLED = RowKind(0), RowKind(2)
LOAD = Load(6, 0, 10, 100)


def test_rows_that_did_the_same_are_told_once():
    rows = (
        (DecodeRow(1, TREE, GREEDY, 11), RowResult((5, 6), path=(2,), next_rank=1, num_ranks=4)),
        (DecodeRow(2, TREE, GREEDY, 12), RowResult((7, 8), path=(2,), next_rank=1, num_ranks=4)),
        (DecodeRow(3, TREE, SAMPLED, 13), RowResult((5, 6), path=(2,), next_rank=1, num_ranks=4)),
        (DecodeRow(4, TREE, GREEDY, 14), RowResult((5, 6), path=(1,), next_rank=1, num_ranks=4)),
        (DecodeRow(5, PLAIN, GREEDY, 15), RowResult((5,))),
        (DecodeRow(6, TREE, GREEDY, 16), RowResult((5, 6), path=(2,), next_rank=1, num_ranks=4)),
    )
    chunks = (PrefillChunk(7, 0, (1, 2, 3), 4, 0),)
    plan = StepPlan(8, (), (), chunks, tuple(row for row, _ in rows), 0)
    stats = StepStats.of(plan, LOAD, StepResult(8, tuple(result for _, result in rows), 0.5))
    assert stats == StepStats(
        step_idx=8,
        load=LOAD,
        rows=(
            RowStats(TREE, 1, (1,), 1, 4, GREEDY, (11, 12, 16)),
            RowStats(TREE, 1, (1,), 1, 4, SAMPLED, (13,)),
            RowStats(TREE, 1, (0,), 1, 4, GREEDY, (14,)),
            RowStats(PLAIN, 0, kind=GREEDY, sequence_idxs=(15,)),
        ),
        num_prefill_tokens=3,
        seconds=0.5,
    )
    assert stats.num_rows == 6
