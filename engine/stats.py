"""What a running engine answers about itself: facts fixed at start, and counters that grow.

Turning them into metrics is left to `app/metrics.py`.
"""

from dataclasses import dataclass

from engine.dispatch_stats import NOT_CHOSEN, DispatchStats
from engine.draft_status import NO_DRAFT, DraftStatus

# Bounds of the counts of steps by their time, in seconds.
STEP_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the machine answered when the engine started.

    `draft_digest` and `model_digest` name the bytes really loaded; `trees` lists the topologies this engine
    may run. `load_seconds` is how long reading the weights and wiring them took.
    """

    model_name: str
    model_folder: str
    model_digest: str
    draft_digest: str | None
    dtype: str
    device: str
    attention_backend: str
    num_threads: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int
    block_size: int
    num_blocks: int
    trees: tuple[str, ...]
    load_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start and gauges now.

    num_calls counts (sequence, verification) pairs, so num_output_tokens / num_calls is the acceptance length
    (tokens per call), which counts the bonus or residual token; num_accepted counts kept drafts only.
    `accepted_by_depth[d]` counts kept drafts at depth d + 1; `steps_by_tree` counts decode rows by topology
    name, a row once per step. num_drafts counts (sequence, step) pairs that drafted, num_drafted their draft
    tokens; these and steps_by_tree include the last step in flight of a sequence that turned out to have
    ended. num_finished leaves out aborted and failed sequences, but holds those ended by a stop string.
    step_seconds is device time; `steps_by_time[i]` counts steps that took at most `STEP_SECONDS[i]` and more
    than the bound before, the last entry those beyond all bounds. `steps_by_rows` counts steps that decode by
    their rows.
    """

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_held_blocks: int
    num_cached_blocks: int
    num_steps: int
    num_calls: int
    num_drafts: int
    num_drafted: int
    num_accepted: int
    num_prompt_tokens: int
    num_prefix_hit_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_finished: int
    num_aborted: int
    num_failed: int
    accepted_by_depth: tuple[int, ...]
    steps_by_tree: tuple[tuple[str, int], ...]
    step_seconds: float
    dispatch: DispatchStats = NOT_CHOSEN
    draft: DraftStatus = NO_DRAFT
    steps_by_rows: tuple[tuple[int, int], ...] = ()
    steps_by_time: tuple[int, ...] = (0,) * (len(STEP_SECONDS) + 1)

    @property
    def tokens_per_call(self) -> float:
        """The acceptance length so far, at least 1; 1.0 before the first call."""
        return self.num_output_tokens / self.num_calls if self.num_calls else 1.0
