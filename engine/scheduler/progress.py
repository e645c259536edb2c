"""Where one live sequence stands on the device, as far as the host can know.

The host is one step late, so lengths here are bounds; deciding what runs next is left to the scheduler.
"""

from collections import deque
from dataclasses import dataclass, field

from engine.request import Sequence
from engine.scheduler.stopping import StopRule
from engine.tree.topology import TreeTopology


@dataclass(slots=True, eq=False)
class Progress:
    """The scheduler's record of a sequence from `add` to its end.

    `topology` is the request's own choice, None for the dispatcher's. Positions below `num_prefilled` have
    been given to a prefill chunk, up to `prefill_end`; `store_from` is where writing starts. `ahead` holds
    the topologies of planned decode steps that are not committed, oldest first; `num_in_flight` counts those
    and uncommitted chunks. `draft_valid` is a range of positions whose draft K/V is sure to be written by
    steps already launched.
    """

    sequence: Sequence
    stop_rule: StopRule
    topology: TreeTopology | None
    num_prefilled: int = 0
    prefill_end: int = 0
    store_from: int = 0
    num_in_flight: int = 0
    ahead: deque[TreeTopology] = field(default_factory=deque)
    draft_valid: range = range(0)

    @property
    def is_prefilling(self) -> bool:
        return self.num_prefilled < self.prefill_end

    @property
    def is_ending(self) -> bool:
        """True where the steps in flight, each of at least one token, end the sequence for sure."""
        return self.sequence.num_output + len(self.ahead) >= self.stop_rule.max_output

    @property
    def num_plain_tokens(self) -> int:
        """The tokens that the next step can run of it: what is left of its prompt, and its root."""
        return self.prefill_end - self.num_prefilled + (not self.is_ending)

    @property
    def max_prefix_len(self) -> int:
        """An upper bound of the tokens the device has cached when the next step starts."""
        return len(self.sequence.tokens) - 1 + sum(topology.depth + 1 for topology in self.ahead)

    def num_needed(self, topology: TreeTopology) -> int:
        """Return the tokens that must have a place before a decode step over `topology`."""
        return self.max_prefix_len + topology.depth + 1

    def start(self, num_hit: int, draft_start: int) -> None:
        """Begin a prefill behind `num_hit` cached tokens: the last of them runs again, for its feature."""
        self.prefill_end = len(self.sequence.tokens) - 1
        self.num_prefilled = max(0, num_hit - 1)
        self.store_from = num_hit
        self.draft_valid = range(draft_start, num_hit)

    def extend_draft(self, end: int) -> None:
        """Note that a chunk up to `end` filled the draft K/V as well."""
        self.draft_valid = range(self.draft_valid.start, max(self.draft_valid.stop, end))

    def observe_tree(self, root: int, window: int) -> None:
        """Note that a decode step with drafts ran from position `root`.

        Such a step fills the draft K/V up to its root, but not more than `window` positions: after a longer
        stretch of plain decoding a hole stays, and only what follows it counts.
        """
        end = max(root + 1, self.draft_valid.stop)
        has_hole = end - self.draft_valid.stop > window
        self.draft_valid = range(end - window if has_hole else self.draft_valid.start, end)

    def num_publishable(self, window: int) -> int:
        """Return how many leading tokens may be published: all that are cached, less those whose draft K/V a
        coming step may still fill, since a block is flagged once.
        """
        num_cached = self.sequence.num_cached
        return min(num_cached, max(self.draft_valid.stop, num_cached - window))

    def invalidate_draft(self) -> None:
        """Count no draft K/V written so far, nor by steps in flight, as valid: another draft wrote it."""
        self.draft_valid = range(self.max_prefix_len + 1, self.max_prefix_len + 1)
