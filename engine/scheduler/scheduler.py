"""Which sequences run in a step, and what a collected step does to them.

It touches no tensor, reads no clock and does no I/O; the tree of a step is left to the dispatcher.
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import islice
from operator import attrgetter

from engine.batch import Load, RowResult, SequenceDelta, StepPlan, StepResult
from engine.draft_restart import DraftRestart
from engine.errors import CapacityError, ConfigError, RequestError
from engine.kvcache.kv_cache import KVCache
from engine.logprobs import Logprobs
from engine.request import FinishReason, Sequence, SequenceStatus
from engine.scheduler.progress import Progress
from engine.scheduler.queue import WaitingQueue
from engine.scheduler.step import Flight, FlightChunk, StepBuilder
from engine.scheduler.stopping import StopRule
from engine.tree.library import TreeLibrary
from engine.tree.topology import TreeTopology

MIN_PREFILL = 2  # tokens that let a prefill go on: one position, and the root of the decode that may follow
PREFILL_SHARE = 4  # trees leave one part in four of the budget to prefills that want it
WATERMARK_SHARE = 100  # an admission leaves one block in a hundred to the growth of running sequences

RUNNING = SequenceStatus.RUNNING  # looked up once: every row of every step compares with it
NOT_FINITE = "the logits of the target model were not finite"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of a scheduler. `draft_window` is how many positions one step can back-fill in the draft's
    K/V (`SpeculationConfig.feature_window`).
    """

    max_num_seqs: int
    max_num_waiting: int
    max_batched_tokens: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    draft_window: int

    def __post_init__(self) -> None:
        if self.max_batched_tokens <= self.max_num_seqs:
            raise ConfigError(
                f"max_batched_tokens must exceed max_num_seqs ({self.max_num_seqs}), so that every row can"
                f" decode and a prompt go on in one step; found {self.max_batched_tokens}"
            )


class Scheduler:
    """Continuous batching with chunked prefill, preemption by recompute, and a host one step late.

    `schedule` plans step n + 1 before `commit` brings the result of step n, so every bound it uses adds what
    the step in flight may have emitted. It owns a sequence from `add` to its end. Device work is stream
    ordered: blocks and slots are given back at once, since whatever their next owner writes comes after.
    """

    def __init__(self, config: SchedulerConfig, kv_cache: KVCache, library: TreeLibrary) -> None:
        self._config = config
        self._kv_cache = kv_cache
        self.library = library
        self.root_only = library.get("off")
        self._watermark = max(1, kv_cache.pool.capacity // WATERMARK_SHARE)
        # Steps in flight may run past the length of the model: see `block_table_width`.
        self._max_tokens = config.max_model_len + 2 * (library.max_depth + 1)
        self._live: dict[str, Progress] = {}
        self._waiting = WaitingQueue()
        self._running: list[Progress] = []  # by sort key: the last one is the next victim
        self._free_slots = list(range(1, config.max_num_seqs + 1))  # a heap, so that slots in use stay low
        self._flights: deque[Flight] = deque()
        self._next_step_idx = 0
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """True while a sequence is unfinished or a step is not committed."""
        return bool(self._live or self._flights)

    @property
    def num_in_flight(self) -> int:
        """Steps planned but not committed."""
        return len(self._flights)

    def load(self) -> Load:
        return Load(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_free_blocks=self._kv_cache.pool.num_available,
            num_cached_tokens=sum(progress.sequence.num_cached for progress in self._running),
        )

    def next_load(self) -> Load:
        """Return the load of the step that `schedule` would plan now: sequences that it will admit run.

        Exact for plain steps that hit no prefix and preempt nobody; else a few more or fewer may run.
        """
        load, num_admitted = self.load(), self._num_admissible()
        return replace(
            load, num_running=load.num_running + num_admitted, num_waiting=load.num_waiting - num_admitted
        )

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Raises `RequestError` for one that could never run to its end and
        `CapacityError` when the queue is full.
        """
        request = sequence.request
        if request.request_id in self._live:
            raise RequestError(
                f"request id {request.request_id!r} is in use: ids must be unique", "request_id"
            )
        config = self._config
        rule = StopRule.build(
            request.sampling, sequence.num_prompt, config.eos_token_ids, config.max_model_len
        )
        self._check_fit(sequence, rule)
        topology = self._resolve(request.sampling.speculation)
        if len(self._waiting) >= config.max_num_waiting:
            raise CapacityError(f"{len(self._waiting)} requests are waiting already: try again later")
        self._waiting.push(sequence)  # first: where this raises, nothing has been added
        self._live[request.request_id] = Progress(sequence, rule, topology)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> Sequence | None:
        """End a sequence now, whatever it is doing; None where it is unknown or has ended already. Results of
        a step in flight are dropped.
        """
        progress = self._live.get(request_id)
        if progress is None:
            return None
        self._finish(progress, reason)
        return progress.sequence

    def forget_draft(self) -> tuple[DraftRestart, ...]:
        """Drop all that depends on the draft's weights, which are about to change: the whole prefix index and
        every claim of a running sequence to valid draft K/V. Return where theirs begins anew.
        """
        self._kv_cache.pool.clear_index()
        return tuple(progress.restart_draft() for progress in self._running)

    def schedule(self, topology: TreeTopology, now: float = 0.0) -> StepPlan | None:
        """Plan the next step; rows without a tree of their own use `topology`, sequences that begin note
        `now`. None where nothing can run before a step in flight is committed, or at all.

        Decode rows come first, then prompts under way, then admissions, each in order of priority and
        arrival. Short of budget or blocks a row decodes plainly; short of blocks even so, worse rows are
        preempted; with none left to preempt it waits for a coming step.
        """
        assert len(self._flights) <= 1, "the host may be one step late, not two"
        step = StepBuilder(self._next_step_idx, self._config.max_batched_tokens)
        prefilling = [progress for progress in self._running if progress.is_prefilling]
        wants_prefill = bool(prefilling or (self._waiting and self._free_slots))
        has_room = self._plan_decodes(step, topology, wants_prefill)
        for progress in prefilling:
            if progress.sequence.status is RUNNING:  # else preempted for a row of this step
                self._prefill(step, progress, topology)
        if has_room:
            self._plan_admissions(step, topology, now)
        if step.is_empty:
            return None
        self._next_step_idx += 1
        self._flights.append(step.flight())
        return step.plan()

    def refuse_admission(self, plan: StepPlan, slot: int) -> tuple[StepPlan, SequenceDelta]:
        """Fail a sequence that could not take its slot in `plan`, the step planned last, of which nothing has
        run. Return the step without it, maybe empty: then it must not be launched.
        """
        progress = next(progress for progress in self._running if progress.sequence.slot == slot)
        flight = self._flights.pop().without(progress)
        plan = plan.without(slot)
        if not plan.is_empty:
            self._flights.append(flight)
        return plan, self._fail(progress, "the engine could not start this request")

    def commit(self, result: StepResult) -> tuple[SequenceDelta, ...]:
        """Apply the result of the oldest step in flight; return what its sequences gained: first those that
        failed in a prefill or had it scored, then its rows in order.

        Rows of sequences that have ended meanwhile are dropped. Rows of sequences preempted meanwhile count.
        """
        flight = self._flights.popleft()
        assert flight.step_idx == result.step_idx, (flight.step_idx, result.step_idx)
        scored = dict(result.chunk_logprobs)
        deltas = [
            self._commit_chunk(chunk, idx not in result.failed_chunks, scored.get(idx, ()))
            for idx, chunk in enumerate(flight.chunks)
        ]
        deltas += [self._commit_row(*pair) for pair in zip(flight.rows, result.rows, strict=True)]
        return tuple([delta for delta in deltas if delta is not None])

    def _check_fit(self, sequence: Sequence, rule: StopRule) -> None:
        """Refuse what even an empty engine could not finish: progress of the best row relies on it."""
        if rule.max_output < 1:
            raise RequestError(
                f"the prompt has {sequence.num_prompt} tokens, but the model's length of"
                f" {self._config.max_model_len} must leave room for one more: shorten it",
                "prompt",
            )
        num_tokens = sequence.num_prompt + rule.max_output - 1  # the last token is never cached
        num_blocks = self._kv_cache.num_blocks_for(num_tokens)
        if num_blocks > self._kv_cache.pool.capacity:
            raise RequestError(
                f"prompt and max_tokens need {num_blocks} cache blocks, but the engine has"
                f" {self._kv_cache.pool.capacity}: lower max_tokens or shorten the prompt",
                "max_tokens",
            )

    def _resolve(self, speculation: str) -> TreeTopology | None:
        if speculation == "auto":
            return None
        try:
            return self.library.get(speculation)
        except ConfigError as error:
            raise RequestError(str(error), "speculation") from error

    def _plan_decodes(self, step: StepBuilder, topology: TreeTopology, wants_prefill: bool) -> bool:
        """Plan every decode row; return whether all found blocks without preempting another."""
        rows = [progress for progress in self._running if progress.wants_decode]
        reserve = max(MIN_PREFILL, self._config.max_batched_tokens // PREFILL_SHARE) if wants_prefill else 0
        has_room = True
        for num_behind, progress in zip(reversed(range(len(rows))), rows, strict=True):
            if progress.sequence.status is not RUNNING:
                continue  # preempted for a better row of this step
            tree = progress.topology or topology
            if tree.num_nodes > step.num_left - num_behind - reserve:  # each row behind needs its root
                tree = self.root_only
            while not self._decode(step, progress, tree):
                has_room = False
                if self._running[-1] is progress:
                    break
                self._preempt(self._running[-1])
        return has_room

    def _decode(self, step: StepBuilder, progress: Progress, topology: TreeTopology) -> bool:
        """Plan one more decode step of a row: over `topology`, else plainly; False where there are no blocks
        for either.
        """
        prefix_len = progress.max_prefix_len
        for tree in (topology, self.root_only):
            num_tokens = prefix_len + tree.depth + 1
            if num_tokens <= progress.num_places or self._grow(step, progress, num_tokens):
                step.decode(progress, tree, prefix_len)
                return True
        return False

    def _grow(self, step: StepBuilder, progress: Progress, num_tokens: int) -> bool:
        """Reserve blocks for `num_tokens` tokens of a row; return whether there were enough."""
        assert num_tokens <= self._max_tokens, (num_tokens, self._max_tokens)
        new_ids = self._kv_cache.reserve(progress.sequence, num_tokens)
        if new_ids is None:
            return False
        step.grow(progress.sequence, new_ids)
        progress.num_places = len(progress.sequence.block_ids) * self._kv_cache.pool.block_size
        return True

    def _prefill(self, step: StepBuilder, progress: Progress, topology: TreeTopology) -> None:
        """Run as much of a prompt as the budget holds; with its last position the row decodes as well."""
        num_remaining = progress.prefill_end - progress.num_prefilled
        num_tokens = min(num_remaining, step.num_left)
        if num_tokens == num_remaining == step.num_left:
            num_tokens -= 1  # keep room for the root
        if num_tokens > 0:
            step.prefill(progress, num_tokens)
        if progress.is_prefilling:
            return
        tree = progress.topology or topology
        is_planned = self._decode(step, progress, tree if tree.num_nodes <= step.num_left else self.root_only)
        assert is_planned, "an admission holds the blocks of its first plain decode"

    def _plan_admissions(self, step: StepBuilder, topology: TreeTopology, now: float) -> None:
        while len(self._waiting) and self._free_slots and step.num_left >= MIN_PREFILL:
            sequence = self._waiting.peek()
            progress = self._live[sequence.request.request_id]
            if progress.num_in_flight:
                return  # preempted: what it emitted last is not known yet
            num_spare = self._watermark if self._running else 0
            hit = self._kv_cache.admit(sequence, len(sequence.tokens), num_spare)
            if hit is None:
                return
            self._waiting.remove(sequence)
            sequence.slot = heappop(self._free_slots)
            sequence.status = RUNNING
            sequence.num_cached = len(hit.block_ids) * self._kv_cache.pool.block_size
            if sequence.num_preemptions == 0:
                sequence.num_prefix_hits, sequence.started = sequence.num_cached, now
            progress.start(sequence.num_cached, hit.draft_start)
            insort(self._running, progress, key=attrgetter("sequence.sort_key"))
            step.admit(sequence, hit.draft_start)
            self._prefill(step, progress, topology)

    def _num_admissible(self) -> int:
        """Count the waiting sequences that find a slot, blocks and tokens of the budget in the next step."""
        if not self._waiting or not self._free_slots:
            return 0
        num_tokens = self._config.max_batched_tokens - sum(p.num_plain_tokens for p in self._running)
        num_blocks = self._kv_cache.pool.num_available
        num_admitted = 0
        for sequence in islice(self._waiting, len(self._free_slots)):
            num_blocks -= self._kv_cache.num_blocks_for(len(sequence.tokens))
            num_spare = self._watermark if self._running or num_admitted else 0
            is_late = self._live[sequence.request.request_id].num_in_flight > 0
            if is_late or num_blocks < num_spare or num_tokens < MIN_PREFILL:
                break
            num_tokens -= len(sequence.tokens)
            num_admitted += 1
        return num_admitted

    def _preempt(self, progress: Progress) -> None:
        """Take a row's blocks and slot; it will be recomputed from its known tokens. Its step in flight still
        counts.
        """
        sequence = progress.sequence
        self._leave(progress)
        self._kv_cache.release(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_cached = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.push(sequence)

    def _leave(self, progress: Progress) -> None:
        """Take a row out of the batch."""
        self._running.remove(progress)
        heappush(self._free_slots, progress.sequence.slot)
        progress.sequence.slot = -1

    def _finish(self, progress: Progress, reason: FinishReason) -> None:
        """End a sequence and give back all it holds."""
        sequence = progress.sequence
        if sequence.status is RUNNING:
            self._leave(progress)
        else:
            self._waiting.remove(sequence)
        if reason is FinishReason.ERROR:
            self._kv_cache.discard(sequence)
        else:
            self._kv_cache.release(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        del self._live[sequence.request.request_id]

    def _commit_chunk(self, chunk: FlightChunk, is_finite: bool, logprobs: Logprobs) -> SequenceDelta | None:
        progress, sequence = chunk.progress, chunk.progress.sequence
        progress.num_in_flight -= 1
        if sequence.is_finished:
            return None
        if not is_finite:
            return self._fail(progress, NOT_FINITE)
        if sequence.status is RUNNING:
            sequence.num_cached = chunk.end
            progress.extend_draft(chunk.end)
            self._publish(progress)
        scored = progress.scores.take(logprobs, chunk.end, sequence.num_prompt)
        return progress.delta((), 0, scores=scored) if scored else None

    def _fail(self, progress: Progress, message: str) -> SequenceDelta:
        self._finish(progress, FinishReason.ERROR)
        return progress.delta((), 0, message)

    def _commit_row(self, progress: Progress, result: RowResult) -> SequenceDelta | None:
        sequence, topology = progress.sequence, progress.collect_decode()
        if sequence.is_finished:
            return None
        if not result.is_finite:
            return self._fail(progress, result.reason or NOT_FINITE)
        root, token_ids, finish_reason = len(sequence.tokens) - 1, result.token_ids, None
        num_accepted = len(token_ids) - 1
        if progress.stop_rule.may_end(sequence.num_output, token_ids):
            cut = progress.stop_rule.cut(sequence.num_output, token_ids)
            token_ids, finish_reason = cut.token_ids, cut.finish_reason
            num_accepted = min(len(token_ids), num_accepted)
        sequence.tokens.extend(token_ids)
        sequence.num_calls += 1
        sequence.num_drafted += topology.num_drafts
        sequence.num_accepted += num_accepted
        if sequence.status is RUNNING:
            sequence.num_cached = len(sequence.tokens) - 1
            progress.observe_decode(topology, root, root + len(result.token_ids), self._config.draft_window)
            self._publish(progress)
        if finish_reason is not None:
            self._finish(progress, finish_reason)
        return progress.delta(token_ids, num_accepted, None, result.logprobs[: len(token_ids)])

    def _publish(self, progress: Progress) -> None:
        sequence = progress.sequence
        if sequence.num_cached >= progress.publish_from:
            num_tokens = progress.num_publishable(self._config.draft_window)
            progress.publish_from = self._kv_cache.publish(sequence, num_tokens, progress.draft_valid)
