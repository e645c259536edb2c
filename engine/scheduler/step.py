"""One step while it is being planned, and the record of it that waits for the step's result.

What goes into a step, and in which order, is left to the scheduler.
"""

from dataclasses import dataclass

from engine.batch import Admission, BlockGrowth, DecodeRow, PrefillChunk, StepPlan
from engine.request import Sequence
from engine.scheduler.progress import Progress
from engine.tree.topology import TreeTopology


@dataclass(frozen=True, slots=True)
class FlightChunk:
    """A prefill chunk in flight: positions below `end` are written once it is collected."""

    progress: Progress
    end: int


@dataclass(frozen=True, slots=True)
class Flight:
    """A planned step whose result is awaited. `rows` names the sequences that decode, not their slots, which
    may have new owners by then.
    """

    step_idx: int
    chunks: tuple[FlightChunk, ...]
    rows: tuple[Progress, ...]

    def without(self, progress: Progress) -> "Flight":
        """Return the step without one sequence."""
        return Flight(
            self.step_idx,
            tuple(chunk for chunk in self.chunks if chunk.progress is not progress),
            tuple(row for row in self.rows if row is not progress),
        )


class StepBuilder:
    """Collects one step within a token budget; `num_left` is what the budget still holds."""

    def __init__(self, step_idx: int, num_tokens: int) -> None:
        self.num_left = num_tokens
        self._step_idx = step_idx
        self._admissions: list[Admission] = []
        self._growths: list[BlockGrowth] = []
        self._chunks: list[PrefillChunk] = []
        self._rows: list[DecodeRow] = []
        self._flight_chunks: list[FlightChunk] = []
        self._flight_rows: list[Progress] = []
        self._max_prefix_len = 0

    @property
    def is_empty(self) -> bool:
        return not self._chunks and not self._rows

    def admit(self, sequence: Sequence, draft_start: int) -> None:
        """Give the sequence's slot its state and its first blocks."""
        admission = Admission(
            slot=sequence.slot,
            tokens=tuple(sequence.tokens),
            num_prompt=sequence.num_prompt,
            sampling=sequence.request.sampling,
            seed=sequence.seed,
            draft_start=draft_start,
        )
        self._admissions.append(admission)
        self.grow(sequence, tuple(sequence.block_ids))

    def grow(self, sequence: Sequence, new_ids: tuple[int, ...]) -> None:
        """Note that `new_ids`, maybe none, are now the last blocks of the sequence."""
        if new_ids:
            start_idx = len(sequence.block_ids) - len(new_ids)
            self._growths.append(BlockGrowth(sequence.slot, start_idx, new_ids))

    def prefill(self, progress: Progress, num_tokens: int) -> None:
        """Run the next `num_tokens` positions of a prompt."""
        sequence, start = progress.sequence, progress.num_prefilled
        end = start + num_tokens
        assert 0 < num_tokens <= self.num_left, (num_tokens, self.num_left)
        assert end <= progress.prefill_end, (end, progress.prefill_end)
        chunk = PrefillChunk(
            slot=sequence.slot,
            start=start,
            token_ids=tuple(sequence.tokens[start:end]),
            next_token_id=sequence.tokens[end],
            store_from=max(start, progress.store_from),
        )
        self._chunks.append(chunk)
        self._flight_chunks.append(FlightChunk(progress, end))
        self.num_left -= num_tokens
        progress.num_prefilled = end
        progress.num_in_flight += 1

    def decode(self, progress: Progress, topology: TreeTopology, prefix_len: int) -> None:
        """Decode one row over `topology`, behind at most `prefix_len` cached tokens."""
        self.num_left -= topology.num_nodes
        assert self.num_left >= 0, (topology.name, self.num_left)
        if prefix_len > self._max_prefix_len:
            self._max_prefix_len = prefix_len
        self._rows.append(progress.plan_decode(topology))
        self._flight_rows.append(progress)

    def plan(self) -> StepPlan:
        return StepPlan(
            step_idx=self._step_idx,
            admissions=tuple(self._admissions),
            growths=tuple(self._growths),
            chunks=tuple(self._chunks),
            rows=tuple(self._rows),
            max_prefix_len=self._max_prefix_len,
        )

    def flight(self) -> Flight:
        return Flight(self._step_idx, tuple(self._flight_chunks), tuple(self._flight_rows))
