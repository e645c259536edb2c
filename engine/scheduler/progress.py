"""Where one live sequence stands on the device, as far as the host can know.

The host is one step late, so lengths here are bounds; deciding what runs next is left to the scheduler.
"""

from collections import deque
from dataclasses import dataclass, field

from engine.batch import DecodeRow, SequenceDelta
from engine.draft_restart import DraftRestart
from engine.logprobs import Logprobs, PromptScores
from engine.request import Sequence
from engine.row_kind import RowKind
from engine.scheduler.stopping import StopRule
from engine.tree.topology import TreeTopology


@dataclass(slots=True, eq=False)
class Progress:
    """The scheduler's record of a sequence from `add` to its end.

    `topology` is the request's own choice, None for the dispatcher's. Positions below `num_prefilled` have
    been given to a prefill chunk, up to `prefill_end`; `store_from` is where writing starts. `ahead` holds
    the topologies of planned decode steps that are not committed, oldest first, and `num_ahead` counts the
    tokens that they may emit; `num_in_flight` counts those steps and uncommitted chunks. `draft_valid` is a
    range of positions whose draft K/V is sure to be written by steps already launched. Up to `num_places`
    tokens have a place; below `publish_from` cached tokens no block can be published; `row` was decoded last.
    """

    sequence: Sequence
    stop_rule: StopRule
    topology: TreeTopology | None
    num_prefilled: int = 0
    prefill_end: int = 0
    store_from: int = 0
    num_in_flight: int = 0
    ahead: deque[TreeTopology] = field(default_factory=deque)
    num_ahead: int = 0
    draft_valid: range = range(0)
    num_places: int = 0
    publish_from: int = 0
    row: DecodeRow | None = None
    scores: PromptScores = field(default_factory=PromptScores)

    @property
    def is_prefilling(self) -> bool:
        return self.num_prefilled < self.prefill_end

    @property
    def wants_decode(self) -> bool:
        """True where the whole prompt has been given to chunks and the next step may emit more."""
        return self.num_prefilled >= self.prefill_end and not self.is_ending

    @property
    def is_ending(self) -> bool:
        """True where the steps in flight, each of at least one token, end the sequence for sure."""
        sequence = self.sequence
        return len(sequence.tokens) - sequence.num_prompt + len(self.ahead) >= self.stop_rule.max_output

    @property
    def num_plain_tokens(self) -> int:
        """The tokens that the next step can run of it: what is left of its prompt, and its root."""
        return self.prefill_end - self.num_prefilled + (not self.is_ending)

    @property
    def max_prefix_len(self) -> int:
        """An upper bound of the tokens the device has cached when the next step starts."""
        return len(self.sequence.tokens) - 1 + self.num_ahead

    def plan_decode(self, topology: TreeTopology) -> DecodeRow:
        """Note a decode step that is about to be launched and return its row, the last one while it fits."""
        self.ahead.append(topology)
        self.num_ahead += topology.depth + 1
        self.num_in_flight += 1
        sequence, row = self.sequence, self.row
        if row is None or row.topology is not topology or sequence.num_cached > row.kind.max_context:
            kind = RowKind.of(sequence.request.sampling, sequence.num_cached)
            self.row = row = DecodeRow(sequence.slot, topology, kind, sequence.arrival_idx)
        return row

    def collect_decode(self) -> TreeTopology:
        """Note that the oldest decode step in flight has come back, and return its topology."""
        topology = self.ahead.popleft()
        self.num_ahead -= topology.depth + 1
        self.num_in_flight -= 1
        return topology

    def start(self, num_hit: int, draft_start: int) -> None:
        """Begin a prefill behind `num_hit` cached tokens: the last of them runs again, for its feature."""
        self.prefill_end = len(self.sequence.tokens) - 1
        self.num_prefilled = max(0, num_hit - 1)
        self.store_from = num_hit
        self.draft_valid = range(draft_start, num_hit)
        self.num_places = self.publish_from = 0
        self.row = None

    def extend_draft(self, end: int) -> None:
        """Note that a chunk up to `end` filled the draft K/V as well."""
        self.draft_valid = range(self.draft_valid.start, max(self.draft_valid.stop, end))

    def observe_decode(self, topology: TreeTopology, root: int, next_root: int, window: int) -> None:
        """Note draft K/V that a collected step filled, and the step in flight, now that its root is known."""
        if topology.num_drafts and root >= self.draft_valid.stop:
            self.observe_tree(root, window)
        if self.ahead and self.ahead[0].num_drafts:
            self.observe_tree(next_root, window)

    def observe_tree(self, root: int, window: int) -> None:
        """Note that a decode step with drafts ran from position `root`.

        Such a step fills the draft K/V up to its root, but not more than `window` positions: after a longer
        stretch of plain decoding a hole stays, and only what follows it counts.
        """
        valid = self.draft_valid
        if root < valid.stop:
            return
        has_hole = root + 1 - valid.stop > window
        self.draft_valid = range(root + 1 - window if has_hole else valid.start, root + 1)

    def num_publishable(self, window: int) -> int:
        """Return how many leading tokens may be published: all that are cached, less those whose draft K/V a
        coming step may still fill, since a block is flagged once.
        """
        num_cached, num_valid = self.sequence.num_cached, self.draft_valid.stop
        if num_valid >= num_cached:
            return num_cached
        return max(num_valid, num_cached - window)

    def delta(
        self, token_ids: tuple[int, ...], num_accepted: int, message: str | None = None, scores: Logprobs = ()
    ) -> SequenceDelta:
        """Return what the sequence gained, beside its totals so far."""
        sequence = self.sequence
        return SequenceDelta(
            sequence.request.request_id,
            token_ids,
            num_accepted,
            sequence.finish_reason,
            sequence.num_calls,
            sequence.num_drafted,
            sequence.num_accepted,
            sequence.num_prefix_hits,
            message,
            sequence.started,
            scores,
        )

    def restart_draft(self) -> DraftRestart:
        """Count no draft K/V written so far, nor by steps in flight, as valid: another draft wrote it."""
        self.draft_valid = range(self.max_prefix_len + 1, self.max_prefix_len + 1)
        start = max(self.store_from, self.num_prefilled * self.is_prefilling)
        return DraftRestart(self.sequence.slot, start, self.is_prefilling)
