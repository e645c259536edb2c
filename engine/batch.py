"""Everything one step needs, as plain picklable data, and what a step answers.

Device tensors are built from it in `runner` only.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.logprobs import Logprobs
from engine.request import FinishReason, SamplingParams
from engine.row_kind import ANY_KIND, RowKind
from engine.tree.topology import TreeTopology

DUMMY_SLOT = 0  # a padded row of a batch is this slot: it reads an empty prefix and writes to the dummy block
DUMMY_BLOCK = 0
NUM_RANKS = 8  # of the draft's distribution that are told apart


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence takes a slot: its rows of device state are set before the step runs.

    `tokens` is the whole known text (prompt, and what was emitted before a preemption); its last token is the
    root of the first decode step. `draft_start` is the first position whose draft K/V may be read.
    """

    slot: int
    tokens: tuple[int, ...]
    num_prompt: int
    sampling: SamplingParams
    seed: int
    draft_start: int


@dataclass(frozen=True, slots=True)
class BlockGrowth:
    """Blocks `block_ids` are appended to the block table of `slot` from index `start_idx`."""

    slot: int
    start_idx: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Positions [start, start + len(token_ids)) of one prompt enter the cache; nothing is sampled.

    `next_token_id` is the token after the chunk (a prefill always ends before the last known token), which
    the draft pairs with the last feature. K/V of positions before `store_from` is computed for its feature
    only: after a prefix hit the last cached token is run once more, since the cache keeps no features, and
    shared blocks are never written.
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    next_token_id: int
    store_from: int


class DecodeRow(NamedTuple):
    """One sequence decodes in this step over `topology`. `kind` and `sequence_idx` tell the dispatcher which
    rows are alike and which are the same.
    """

    slot: int
    topology: TreeTopology
    kind: RowKind = ANY_KIND
    sequence_idx: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: apply `admissions` and `growths`, run `chunks`, then decode `rows`.

    `max_prefix_len` bounds the cached tokens of every decode row on the device, which may be ahead of the
    host. A row may be in `chunks` (its last chunk) and in `rows` of the same step.
    """

    step_idx: int
    admissions: tuple[Admission, ...]
    growths: tuple[BlockGrowth, ...]
    chunks: tuple[PrefillChunk, ...]
    rows: tuple[DecodeRow, ...]
    max_prefix_len: int

    @property
    def is_empty(self) -> bool:
        """True where nothing would run."""
        return not self.chunks and not self.rows

    def without(self, slot: int) -> "StepPlan":
        """Return the step without all that concerns one slot."""
        return replace(
            self,
            admissions=tuple(admission for admission in self.admissions if admission.slot != slot),
            growths=tuple(growth for growth in self.growths if growth.slot != slot),
            chunks=tuple(chunk for chunk in self.chunks if chunk.slot != slot),
            rows=tuple(row for row in self.rows if row.slot != slot),
        )


class RowResult(NamedTuple):
    """What one decode row emitted: `token_ids` holds the accepted drafts, then the bonus or residual token.

    `is_finite` is False where the logits were not finite, for the `reason` or by the target's fault: the
    row's tokens mean nothing. `path` holds the node ids of the accepted drafts. `next_rank` is the last
    token's among the draft's best `num_ranks` at its node, `num_ranks` for none of them; None where nobody
    looked. `logprobs` has one entry per token where the request asks, else it is empty.
    """

    token_ids: tuple[int, ...]
    is_finite: bool = True
    path: tuple[int, ...] = ()
    next_rank: int | None = None
    num_ranks: int = NUM_RANKS
    logprobs: Logprobs = ()
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to a `StepPlan`, one `RowResult` per decode row, in the plan's order; `seconds` is how
    long the device worked on it. `failed_chunks` holds the indices of the plan's chunks whose hidden states
    were not finite. `chunk_logprobs` has (index, entries) of each chunk that asks, an entry for each
    of its positions about the token after it.
    """

    step_idx: int
    rows: tuple[RowResult, ...]
    seconds: float = 0.0
    failed_chunks: tuple[int, ...] = ()
    chunk_logprobs: tuple[tuple[int, Logprobs], ...] = ()


class SequenceDelta(NamedTuple):
    """What one sequence gained in a step: the new tokens, and how it ended if it did.

    The counters are totals of the sequence so far: `num_calls` verification calls, `num_drafted` drafts
    verified, `num_accepted` drafts kept, `num_prefix_hits` prompt tokens found in the prefix cache.
    `num_accepted_in_step` says how many of `token_ids` were drafts: they come first. `started` is when its
    prefill began, in seconds of this machine's monotonic clock. `logprobs` has one entry per token where the
    request asks; in a delta without tokens it goes on with the prompt, from its second token.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_accepted_in_step: int
    finish_reason: FinishReason | None
    num_calls: int
    num_drafted: int
    num_accepted: int
    num_prefix_hits: int
    message: str | None = None
    started: float = 0.0
    logprobs: Logprobs = ()


@dataclass(frozen=True, slots=True)
class Load:
    """What a dispatcher may know before a step, where `num_running` counts the sequences that the step will
    admit. `num_free_blocks` counts evictable blocks too.
    """

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_cached_tokens: int
