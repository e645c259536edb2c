"""Counting what an engine did. What the numbers mean is said in `stats`."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from engine.batch import Load, SequenceDelta
from engine.kvcache.block_pool import BlockCounts
from engine.request import FinishReason
from engine.stats import STEP_SECONDS, EngineStats
from engine.step_stats import StepStats


@dataclass(slots=True)
class Counters:
    """Totals since the start; written by the engine only."""

    num_steps: int = 0
    num_calls: int = 0
    num_drafts: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_prompt_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    accepted_by_depth: Counter[int] = field(default_factory=Counter)
    steps_by_tree: Counter[str] = field(default_factory=Counter)
    steps_by_rows: Counter[int] = field(default_factory=Counter)
    steps_by_time: Counter[int] = field(default_factory=Counter)
    step_seconds: float = 0.0

    def observe(self, stats: StepStats, deltas: tuple[SequenceDelta, ...]) -> None:
        """Count one collected step and what its sequences kept of it."""
        self.num_steps += 1
        self.step_seconds += stats.seconds
        self.steps_by_time[bisect_left(STEP_SECONDS, stats.seconds)] += 1
        if stats.rows:
            self.steps_by_rows[stats.num_rows] += 1
        for row in stats.rows:
            tree, num_rows = row.topology, row.num_rows
            self.num_drafts += num_rows * (tree.num_drafts > 0)
            self.num_drafted += num_rows * tree.num_drafts
            self.steps_by_tree[tree.name] += num_rows
        for num_accepted, num_rows in Counter([delta.num_accepted_in_step for delta in deltas]).items():
            self.num_accepted += num_rows * num_accepted
            for depth in range(num_accepted):
                self.accepted_by_depth[depth] += num_rows
        num_tokens = [len(delta.token_ids) for delta in deltas]
        self.num_calls += len(num_tokens) - num_tokens.count(0)  # a failed sequence gained nothing
        self.num_output_tokens += sum(num_tokens)
        for delta in deltas:
            if delta.finish_reason is not None:
                self.count_end(delta.finish_reason, delta.num_prefix_hits)

    def count_end(self, reason: FinishReason, num_prefix_hits: int) -> None:
        """Count the end of one sequence."""
        match reason:
            case FinishReason.ABORT:
                self.num_aborted += 1
            case FinishReason.ERROR:
                self.num_failed += 1
            case _:
                self.num_finished += 1
        self.num_prefix_hit_tokens += num_prefix_hits

    def snapshot(self, load: Load, blocks: BlockCounts, num_preemptions: int) -> EngineStats:
        """Return the totals beside the gauges of now."""
        deepest = max(self.accepted_by_depth, default=-1)
        return EngineStats(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_free_blocks=blocks.num_free,
            num_held_blocks=blocks.num_held,
            num_cached_blocks=blocks.num_cached,
            num_steps=self.num_steps,
            num_calls=self.num_calls,
            num_drafts=self.num_drafts,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
            num_prompt_tokens=self.num_prompt_tokens,
            num_prefix_hit_tokens=self.num_prefix_hit_tokens,
            num_output_tokens=self.num_output_tokens,
            num_preemptions=num_preemptions,
            num_finished=self.num_finished,
            num_aborted=self.num_aborted,
            num_failed=self.num_failed,
            accepted_by_depth=tuple(self.accepted_by_depth[depth] for depth in range(deepest + 1)),
            steps_by_tree=tuple(sorted(self.steps_by_tree.items())),
            step_seconds=self.step_seconds,
            steps_by_rows=tuple(sorted(self.steps_by_rows.items())),
            steps_by_time=tuple(self.steps_by_time[idx] for idx in range(len(STEP_SECONDS) + 1)),
        )
