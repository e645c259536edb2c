"""Decode steps as captured CUDA graphs, one set of three per (rows, tree shape), replayed with new slots.

Topology, lengths, tables and parameters are device data, so one set serves every batch that fits its sizes;
padding rows are the dummy slot. What a step computes is left to `decode_step`.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from engine.batch import DUMMY_SLOT
from engine.errors import ConfigError
from engine.runner.decode_step import DecodeBatch, DecodeStep, NodeOutput
from engine.runner.graph_recorder import GraphRecorder, Recorded, borrow
from engine.runner.guides import GuidedStep
from engine.runner.launch_rows import LaunchRows
from engine.runner.step_output import DecodedRows
from engine.speculation import SamplingFlags, TreeShape, TreeTensors, upload
from engine.step_rows import StepRows
from engine.tree.topology import TreeTopology

logger = logging.getLogger(__name__)

# Sampling work that is captured: plain argmax, noise, and noise with truncation. Rarer needs run uncaptured.
CAPTURED_FLAGS = (
    SamplingFlags(),
    SamplingFlags(is_sampled=True),
    SamplingFlags(is_sampled=True, is_truncated=True),
)
R = TypeVar("R")


class CaptureMemoryError(ConfigError):
    """The steps of so many rows over such a tree do not fit the device beside weights and cache."""


def row_bucket(num_rows: int) -> int:
    """Return the captured batch size that `num_rows` are padded to: 1, 2, 4, then multiples of 8, of 16 from
    64 and of 32 from 128, so that padding costs at most a quarter.
    """
    if num_rows <= 4:
        return 1 << (num_rows - 1).bit_length()
    step = 8 if num_rows <= 64 else 16 if num_rows <= 128 else 32
    return -(-num_rows // step) * step


@dataclass(slots=True)
class _StepSet:
    """The graphs of one (rows, shape), which all share `rows`. The draft has one for each of `widths`, the
    commit one for each set of flags. `logits` are the target's, until the next replay of any set.
    """

    tree: TreeTensors
    topologies: tuple[TreeTopology, ...]
    rows: StepRows
    widths: tuple[int, ...]
    drafts: dict[int, Recorded[None]]
    target: torch.cuda.CUDAGraph
    logits: Tensor
    commits: dict[SamplingFlags, Recorded[DecodedRows]]


class StepGraphs:
    """Captures decode steps and replays them.

    `window` is the most positions a draft can catch up with in one step.
    """

    def __init__(
        self,
        step: DecodeStep,
        recorder: GraphRecorder,
        max_rows: int,
        table_width: int,
        window: int,
    ) -> None:
        self._step, self.recorder = step, recorder
        self._table_width, self._window, self._device = table_width, window, recorder.device
        self._slots = torch.full(
            (row_bucket(max_rows),), DUMMY_SLOT, dtype=torch.int64, device=recorder.device
        )
        self._held_slots: tuple[int, ...] = ()  # what `_slots` begins with, where that is known
        self._sets: dict[tuple[int, TreeShape], _StepSet] = {}
        self.num_replays = 0

    def capture_rows(self, topology: TreeTopology, num_rows: range) -> None:
        """Capture the steps of so many rows whose widest tree is `topology`."""
        before, started = self.recorder.num_graphs, time.perf_counter()
        # The largest first: the smaller ones find room in its memory.
        for bucket in sorted({row_bucket(rows) for rows in num_rows}, reverse=True):
            self.capture(topology, bucket)
        logger.info(
            "captured tree=%s rows=%d..%d graphs=%d seconds=%.1f",
            topology.name,
            num_rows[0],
            num_rows[-1],
            self.recorder.num_graphs - before,
            time.perf_counter() - started,
        )

    @torch.inference_mode()
    def capture(self, topology: TreeTopology, num_rows: int) -> None:
        """Capture the steps of up to `num_rows` rows, of which `topology` is the widest tree. Nothing is
        captured twice. Raises `CaptureMemoryError`, and keeps what was captured before, where memory is
        short.
        """
        bucket, shape = row_bucket(num_rows), TreeShape.of((topology,))
        if (bucket, shape) in self._sets:
            return
        try:
            self._sets[bucket, shape] = self._capture(topology, bucket, shape)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()  # what was tried is of no use to steps that fit
            raise CaptureMemoryError(
                f"no memory is left for steps of {bucket} rows over {topology.name}: lower max_num_seqs, or"
                f" state fewer num_blocks ({error})"
            ) from error

    def _capture(self, topology: TreeTopology, bucket: int, shape: TreeShape) -> _StepSet:
        topologies = (topology,) * bucket
        tree = TreeTensors.padded(topologies, shape, self._device)
        batch = self._batch(tree, 1, SamplingFlags())
        rows = self._step.room(batch)
        widths = tuple(sorted({min(shape.depth + 1, self._window), self._window if shape.depth else 1}))
        drafts = {width: self._record_draft(tree, rows, width) for width in widths}
        target = self._record(lambda: self._step.run_target(batch, rows))
        commits = {flags: self._record_commit(tree, rows, flags, target.output) for flags in CAPTURED_FLAGS}
        # Kept, the logits of every set would fill the memory: 8 GB of a model with 128k tokens at 64 rows.
        logits = borrow(target.output.logits)
        answers = {
            flags: Recorded(commit.graph, replace(commit.output, logits=logits))
            for flags, commit in commits.items()
        }
        return _StepSet(tree, topologies, rows, widths, drafts, target.graph, logits, answers)

    def replay(
        self, asked: LaunchRows, num_pending: int, guide: GuidedStep | None = None
    ) -> DecodedRows | None:
        """Enqueue one step and return what `DecodeStep.commit` does, for these rows and padding; None where
        nothing that was captured fits.

        `num_pending` bounds the positions of any row whose draft K/V is missing. `guide` masks the target's
        logits; captured drafts are not masked, since the host would wait for every level.
        """
        found = self._find(len(asked.slots), asked.shape)
        if found is None or asked.flags not in found.commits:
            return None
        self._set_tree(found, asked.topologies)
        draft = self._draft(found, num_pending)
        self._set_slots(asked.slots + (DUMMY_SLOT,) * (found.tree.num_rows - len(asked.slots)))
        draft.graph.replay()
        if guide is not None:
            guide.read(found.rows.draft.token_ids)
        found.target.replay()
        if guide is not None:
            guide.mask_target(found.logits)
        self.num_replays += 1
        commit = found.commits[asked.flags]
        commit.graph.replay()
        return commit.output

    def forget_drafts(self) -> None:
        """Drop the draft's part of every step, whose weights are about to change. Each is captured anew by
        the first step that needs it, so that no stream waits for all of them.
        """
        for found in self._sets.values():
            found.drafts.clear()

    def _draft(self, found: _StepSet, num_pending: int) -> Recorded[None]:
        """Return the draft's part that catches up with `num_pending` positions."""
        width = next((width for width in found.widths if width >= num_pending), self._window)
        width = width if found.tree.depth else 1
        if width not in found.drafts:
            found.drafts[width] = self._record_draft(found.tree, found.rows, width)
        return found.drafts[width]

    def _find(self, num_rows: int, shape: TreeShape) -> _StepSet | None:
        """Return the smallest set that holds the rows and covers their trees."""
        bucket = row_bucket(num_rows)
        if (bucket, shape) in self._sets:
            return self._sets[bucket, shape]
        fitting = [key for key in self._sets if key[0] == bucket and key[1].covers(shape)]
        return self._sets[min(fitting, key=lambda key: key[1].num_nodes)] if fitting else None

    def _set_slots(self, slots: tuple[int, ...]) -> None:
        """Let the next replay run these slots; most steps run those of the step before."""
        if slots != self._held_slots:
            self._slots[: len(slots)].copy_(upload(slots, torch.int64, self._device))
            self._held_slots = slots

    def _set_tree(self, found: _StepSet, topologies: tuple[TreeTopology, ...]) -> None:
        topologies += (topologies[0],) * (found.tree.num_rows - len(topologies))
        if topologies != found.topologies:
            found.tree.copy_(TreeTensors.padded(topologies, found.tree.shape, self._device))
            found.topologies = topologies

    def _record_draft(self, tree: TreeTensors, rows: StepRows, width: int) -> Recorded[None]:
        batch = self._batch(tree, width, SamplingFlags())
        return self._record(lambda: self._step.draft(batch, rows))

    def _record_commit(
        self, tree: TreeTensors, rows: StepRows, flags: SamplingFlags, output: NodeOutput
    ) -> Recorded[DecodedRows]:
        batch = self._batch(tree, 1, flags)
        return self._record(lambda: self._step.commit(batch, rows, output))

    def _batch(self, tree: TreeTensors, width: int, flags: SamplingFlags) -> DecodeBatch:
        return DecodeBatch(
            slots=self._slots[: tree.num_rows],
            tree=tree,
            flags=flags,
            align_width=width,
            num_read_blocks=self._table_width,
            num_blocks=self._table_width,
        )

    def _record(self, run: Callable[[], R]) -> Recorded[R]:
        """Record what `run` does of dummy rows."""
        self._slots.fill_(DUMMY_SLOT)
        self._held_slots = ()
        return self.recorder.record(run)
