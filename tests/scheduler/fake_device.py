"""A device whose K/V is the digest of the prefix it stands for, so that any wrong block shows at once.

The model is a hash: the next token depends on every token before it and on nothing else.
"""

import random
from collections import deque
from dataclasses import dataclass, field

from engine.batch import (
    Admission,
    BlockGrowth,
    Load,
    PrefillChunk,
    RowResult,
    SequenceDelta,
    StepPlan,
    StepResult,
)
from engine.kvcache.block_pool import BlockPool
from engine.kvcache.kv_cache import KVCache, block_table_width
from engine.request import FinishReason, Request, SamplingParams, Sequence
from engine.scheduler.scheduler import Scheduler, SchedulerConfig
from engine.tree.library import TreeLibrary
from engine.tree.topology import TreeTopology

VOCAB_SIZE = 40
EOS = 7
LIBRARY = TreeLibrary.search()


def extend(digest: int, token_id: int) -> int:
    return hash((digest, token_id))  # hashes of integer tuples are the same in every process


def digests_of(token_ids) -> list[int]:
    digests = [0]
    for token_id in token_ids:
        digests.append(extend(digests[-1], token_id))
    return digests[1:]


def expected_output(request: Request, max_model_len: int) -> tuple[list[int], FinishReason]:
    """Decode one token at a time, with stop rules written the plain way."""
    sampling = request.sampling
    digest = digests_of(request.prompt_token_ids)[-1]
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
    output: list[int] = []
    while True:
        token_id = digest % VOCAB_SIZE
        digest = extend(digest, token_id)
        output.append(token_id)
        if len(output) >= sampling.min_tokens and token_id in stops:
            return output, FinishReason.STOP
        if len(output) == sampling.max_tokens or len(request.prompt_token_ids) + len(output) == max_model_len:
            return output, FinishReason.LENGTH


@dataclass
class Slot:
    digests: list[int]
    tokens: list[int]
    draft_start: int
    draft_stop: int = 0
    num_cached: int = 0
    table: list[int] = field(default_factory=list)


class FakeDevice:
    """Runs plans at once and checks every read and write; `accept` picks accepted counts."""

    def __init__(self, pool: BlockPool, config: SchedulerConfig, accept) -> None:
        self.pool = pool
        self.config = config
        self.accept = accept
        self.table_width = block_table_width(config.max_model_len, LIBRARY.max_depth, pool.block_size)
        self.slots: dict[int, Slot] = {}
        self.target: dict[tuple[int, int], int] = {}
        self.draft: dict[tuple[int, int], int] = {}
        self.drafts_readable: list[float] = []

    def run(self, plan: StepPlan) -> StepResult:
        self._check_plan(plan)
        for admission in plan.admissions:
            self._admit(admission)
        for growth in plan.growths:
            self._grow(growth)
        for chunk in plan.chunks:
            self._prefill(chunk)
        rows = tuple(
            self._decode(self.slots[row.slot], row.topology, plan.max_prefix_len) for row in plan.rows
        )
        return StepResult(plan.step_idx, rows)

    def _check_plan(self, plan: StepPlan) -> None:
        num_tokens = sum(len(c.token_ids) for c in plan.chunks) + sum(r.topology.num_nodes for r in plan.rows)
        assert 0 < num_tokens <= self.config.max_batched_tokens
        for slots in (
            [r.slot for r in plan.rows],
            [c.slot for c in plan.chunks],
            [a.slot for a in plan.admissions],
        ):
            assert len(set(slots)) == len(slots)
            assert all(1 <= slot <= self.config.max_num_seqs for slot in slots)
        for chunk in plan.chunks:
            assert all(0 <= token_id < VOCAB_SIZE for token_id in (*chunk.token_ids, chunk.next_token_id))

    def _admit(self, admission: Admission) -> None:
        tokens = list(admission.tokens)
        self.slots[admission.slot] = Slot(digests_of(tokens), tokens, admission.draft_start)

    def _grow(self, growth: BlockGrowth) -> None:
        slot = self.slots[growth.slot]
        assert growth.start_idx == len(slot.table)
        assert all(1 <= block_id < self.pool.num_blocks for block_id in growth.block_ids)
        slot.table.extend(growth.block_ids)
        assert len(slot.table) <= self.table_width

    def _prefill(self, chunk: PrefillChunk) -> None:
        slot = self.slots[chunk.slot]
        end = chunk.start + len(chunk.token_ids)
        assert chunk.start in (slot.num_cached, chunk.store_from - 1)
        assert chunk.token_ids == tuple(slot.tokens[chunk.start : end])
        assert chunk.next_token_id == slot.tokens[end]
        self._check_target(slot, chunk.start)
        for position in range(chunk.store_from, end):
            self._write(self.target, slot, position)
        # Draft slot j pairs the feature of j - 1 with token j; slot 0 has no feature and is never read.
        for position in range(chunk.store_from if chunk.start == 0 else chunk.start + 1, end + 1):
            self._write(self.draft, slot, position)
        slot.num_cached = end
        slot.draft_stop = end + 1

    def _decode(self, slot: Slot, topology: TreeTopology, max_prefix_len: int) -> RowResult:
        root = len(slot.tokens) - 1
        assert slot.num_cached == root <= max_prefix_len
        assert len(slot.table) * self.pool.block_size >= root + topology.depth + 1
        self._check_target(slot, root)
        if topology.num_drafts:
            self._fill_draft(slot, root)
        num_accepted = self.accept(topology.depth)
        emitted = []
        for _ in range(num_accepted + 1):
            self._write(self.target, slot, len(slot.tokens) - 1)
            token_id = slot.digests[-1] % VOCAB_SIZE
            emitted.append(token_id)
            slot.tokens.append(token_id)
            slot.digests.append(extend(slot.digests[-1], token_id))
        slot.num_cached = len(slot.tokens) - 1
        return RowResult(tuple(emitted))

    def _fill_draft(self, slot: Slot, root: int) -> None:
        """Back-fill as the ring of features allows, then check all that the draft will read."""
        start = max(slot.draft_stop, root + 1 - self.config.draft_window)
        if start > slot.draft_stop:
            slot.draft_start = start
        for position in range(start, root + 1):
            self._write(self.draft, slot, position)
        slot.draft_stop = root + 1
        for position in range(slot.draft_start, root + 1):
            assert self.draft.get(self._place(slot, position)) == slot.digests[position], "draft K/V is wrong"
        self.drafts_readable.append((root + 1 - slot.draft_start) / (root + 1))

    def _check_target(self, slot: Slot, end: int) -> None:
        for position in range(end):
            assert self.target.get(self._place(slot, position)) == slot.digests[position], (
                "target K/V is wrong"
            )

    def _write(self, store: dict[tuple[int, int], int], slot: Slot, position: int) -> None:
        place = self._place(slot, position)
        assert self.pool.num_refs(place[0]) == 1, "a shared block is written"
        assert not self.pool.is_indexed(place[0]), "a published block is written"
        store[place] = slot.digests[position]

    def _place(self, slot: Slot, position: int) -> tuple[int, int]:
        return slot.table[position // self.pool.block_size], position % self.pool.block_size


def make_config(**changes) -> SchedulerConfig:
    values = {
        "max_num_seqs": 4,
        "max_num_waiting": 64,
        "max_batched_tokens": 48,
        "max_model_len": 160,
        "eos_token_ids": frozenset({EOS}),
        "draft_window": 4,
    }
    return SchedulerConfig(**{**values, **changes})


class Simulation:
    """A scheduler, its cache and a fake device; the host is one step late unless `is_late` is False."""

    def __init__(
        self, num_blocks=64, block_size=4, seed=0, is_late=True, accept=None, cache=True, **changes
    ) -> None:
        rng = random.Random(seed)
        self.config = make_config(**changes)
        self.pool = BlockPool(num_blocks, block_size)
        self.kv_cache = KVCache(self.pool, enable_prefix_cache=cache)
        self.scheduler = Scheduler(self.config, self.kv_cache, LIBRARY)
        self.device = FakeDevice(self.pool, self.config, accept or (lambda depth: rng.randint(0, depth)))
        self.is_late = is_late
        self.sequences: dict[str, Sequence] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, SequenceDelta] = {}
        self.plans: list[StepPlan] = []
        self.pending: deque[StepResult] = deque()

    def add(self, request_id: str, prompt, priority: int = 0, **sampling) -> Sequence:
        request = Request(request_id, tuple(prompt), SamplingParams(**sampling), priority)
        sequence = Sequence(request, seed=0, arrival_idx=len(self.sequences))
        self.scheduler.add(sequence)
        self.sequences[request_id] = sequence
        self.outputs[request_id] = []
        return sequence

    def step(self, tree: str = "off") -> StepPlan | None:
        plan = self.scheduler.schedule(LIBRARY.get(tree))
        self.check_blocks()
        if plan is not None:
            self.plans.append(plan)
            self.pending.append(self.device.run(plan))
        else:
            assert self.pending or not self.scheduler.has_work, "nothing runs and nothing is in flight"
        if len(self.pending) > (1 if self.is_late and plan is not None else 0):
            self.commit()
        return plan

    def commit(self) -> None:
        for delta in self.scheduler.commit(self.pending.popleft()):
            assert delta.request_id not in self.ends
            self.outputs[delta.request_id].extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.ends[delta.request_id] = delta
        self.check_blocks()

    def run(self, choose=lambda step_idx: "off", max_steps: int = 3000) -> None:
        for step_idx in range(max_steps):
            if not self.scheduler.has_work:
                break
            self.step(choose(step_idx))
        assert not self.scheduler.has_work, f"not done after {max_steps} steps"
        self.check_idle()

    def check_blocks(self) -> None:
        """Free + held + cached is all but the dummy, and held is what the sequences say they hold."""
        counts = self.pool.counts()
        assert counts.num_free + counts.num_cached + counts.num_held == self.pool.num_blocks - 1
        held = [block_id for sequence in self.sequences.values() for block_id in sequence.block_ids]
        assert counts.num_held == len(set(held))
        assert all(
            self.pool.num_refs(block_id) == held.count(block_id) for block_id in range(self.pool.num_blocks)
        )
        assert 0 not in held

    def check_idle(self) -> None:
        assert self.pool.counts().num_held == 0
        assert self.scheduler.load() == Load(0, 0, self.pool.capacity, 0)
        slots = sorted(self.scheduler._free_slots)
        assert slots == list(range(1, self.config.max_num_seqs + 1))
        assert not self.kv_cache._chains

    def check_outputs(self) -> None:
        """Every sequence that ran to its end emitted exactly what plain decoding emits."""
        for request_id, sequence in self.sequences.items():
            tokens, reason = expected_output(sequence.request, self.config.max_model_len)
            if sequence.finish_reason is FinishReason.ABORT:
                assert self.outputs[request_id] == tokens[: len(self.outputs[request_id])]
                continue
            assert self.outputs[request_id] == tokens
            assert sequence.finish_reason is reason
            assert sequence.tokens == [*sequence.request.prompt_token_ids, *tokens]
            end = self.ends[request_id]
            assert end.num_accepted + end.num_calls >= len(tokens) >= end.num_calls
            assert 0 <= end.num_accepted <= end.num_drafted
