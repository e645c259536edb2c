"""Small prefills as captured CUDA graphs, a target's and a draft's per shape, replayed with new chunks.

A chunk of a hundred tokens takes the host far longer to launch than the device to run. What a prefill
computes is left to `prefill_step`.
"""

import logging
import time
from dataclasses import dataclass

import torch

from engine.batch import PrefillChunk
from engine.runner.graph_recorder import GraphRecorder, Recorded
from engine.runner.packed_chunks import PackedChunks, PrefillShape
from engine.runner.prefill_step import ChunkOutput, PrefillStep
from engine.runner.step_output import PrefilledChunks

logger = logging.getLogger(__name__)

# Tokens and chunks that prefills are padded to. Few tokens cost what reading the weights does, more of them
# by their number: from 256 on padding is at most a third. Room for many chunks costs many tokens nothing.
TOKEN_BUCKETS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
CHUNK_BUCKETS = (8, 64)
_MANY_TOKENS = 1024
# Tokens times weights that a device multiplies while the host launches a prefill, 20 ms: beyond, a replay
# would save nothing and padding would cost.
_MOST_WORK = 5 * 10**12


def captured_shapes(max_tokens: int, max_chunks: int) -> tuple[PrefillShape, ...]:
    """Return the shapes that steps of up to so many tokens and chunks are padded to, the largest first. Each
    has room for a chunk of padding.
    """
    counts = _buckets(CHUNK_BUCKETS, max_chunks)
    shapes = [
        PrefillShape(size, count + 1)
        for size in _buckets(TOKEN_BUCKETS, max_tokens)
        for count in counts
        if count <= size and (size <= _MANY_TOKENS or count == counts[-1])
    ]
    return tuple(sorted(shapes, reverse=True))


def _buckets(buckets: tuple[int, ...], most: int) -> list[int]:
    """Return the buckets up to the first that holds `most`."""
    return [size for size, smaller in zip(buckets, (0, *buckets[:-1]), strict=True) if smaller < most]


@dataclass(slots=True)
class _PrefillSet:
    """The graphs of one shape, which read `packed`; the draft's is None until it is needed. Sets share the
    memory of `output`.
    """

    packed: PackedChunks
    output: ChunkOutput
    target: Recorded[None]
    draft: Recorded[None] | None


class PrefillGraphs:
    """Runs prefills, those of captured shapes as replays. None is captured without a recorder, nor where the
    step cannot be.
    """

    def __init__(self, step: PrefillStep, recorder: GraphRecorder | None, max_chunks: int) -> None:
        self._step, self._max_chunks = step, max_chunks
        self._recorder = recorder if step.is_capturable else None
        self._sets: dict[PrefillShape, _PrefillSet] = {}
        self.num_replays = 0

    def run(self, chunks: tuple[PrefillChunk, ...]) -> PrefilledChunks:
        """Cache the K/V of every chunk. The answer is overwritten by the next call."""
        shape = PrefillShape.of(chunks)
        found = self._find(shape)
        if found is None:
            return self._step.run(chunks)
        draft = self._draft(found)
        found.packed.copy_(chunks)
        found.target.graph.replay()
        if draft is not None:
            draft.graph.replay()
        self.num_replays += 1
        return found.output.first(shape).prefilled

    @torch.inference_mode()
    def capture(self, max_tokens: int) -> None:
        """Capture prefills of up to so many tokens, as far as the host is slower to launch them than the
        device to run them. Nothing is captured twice; what memory is short for runs uncaptured.
        """
        if self._recorder is None:
            return
        before, started = self._recorder.num_graphs, time.perf_counter()
        most = min(max_tokens, max(1, _MOST_WORK // self._step.num_weights))
        shapes = captured_shapes(most, self._max_chunks)
        room = self._step.room(PrefillShape(*map(max, zip(*shapes, strict=True))))
        for shape in shapes:
            if shape not in self._sets:
                self._capture(shape, room.first(shape), self._recorder)
        logger.info(
            "captured prefill tokens=%d..%d graphs=%d seconds=%.1f",
            shapes[-1].num_tokens,
            shapes[0].num_tokens,
            self._recorder.num_graphs - before,
            time.perf_counter() - started,
        )

    def forget_drafts(self) -> None:
        """Drop the draft's part of every prefill, whose weights are about to change. Each is captured anew by
        the first step that needs it, so that no stream waits for all of them.
        """
        for found in self._sets.values():
            found.draft = None

    def _capture(self, shape: PrefillShape, output: ChunkOutput, recorder: GraphRecorder) -> None:
        packed = PackedChunks.padded((), shape, self._step.device)
        try:
            target = recorder.record(lambda: output.copy_(self._step.run_target(packed)))
            found = _PrefillSet(packed, output, target, None)
            self._draft(found)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()  # what was tried is of no use to steps that fit
            logger.warning(
                "prefill not captured tokens=%d chunks=%d reason=%s",
                shape.num_tokens,
                shape.num_chunks - 1,
                error,
            )
        else:
            self._sets[shape] = found

    def _draft(self, found: _PrefillSet) -> Recorded[None] | None:
        """Return the draft's part, recorded over padding where it is missing; None without a draft."""
        if found.draft is None and self._recorder is not None and self._step.has_draft:
            packed, output = found.packed, found.output
            packed.copy_(())
            found.draft = self._recorder.record(lambda: self._step.fill_draft(packed, output))
        return found.draft

    def _find(self, shape: PrefillShape) -> _PrefillSet | None:
        """Return the smallest set that holds `shape` and a chunk of padding."""
        fitting = [
            held
            for held in self._sets
            if held.num_tokens >= shape.num_tokens and held.num_chunks > shape.num_chunks
        ]
        return self._sets[min(fitting)] if fitting else None
