"""Device state against a plain model of it: what a window holds, what a commit moves, what stays behind."""

import functools
import operator
import random
from dataclasses import dataclass, field

import pytest
import torch

from engine.batch import Admission, BlockGrowth
from engine.request import SamplingParams
from engine.runner.slot_state import SlotState
from engine.sampling.warp import warp
from engine.speculation import SamplingFlags, TreeTensors, Verification
from engine.step_rows import StepRows
from engine.tree.topology import chain

VOCAB, WINDOW, FEATURES, EOS, BLOCK_SIZE = 31, 6, 3, (5, 6), 4
NEUTRAL = SamplingParams()
EVERYTHING = SamplingParams(
    temperature=0.7,
    top_k=3,
    top_p=0.6,
    min_p=0.1,
    repetition_penalty=1.7,
    presence_penalty=0.5,
    frequency_penalty=0.9,
    logit_bias=((2, 40.0), (9, -40.0)),
    max_tokens=50,
    min_tokens=30,
    stop_token_ids=(7, 8),
)


def make_state(num_slots: int = 4) -> SlotState:
    return SlotState(
        num_slots=num_slots,
        table_width=8,
        window=WINDOW,
        feature_size=FEATURES,
        vocab_size=VOCAB,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def admission(slot: int, tokens: tuple[int, ...], sampling=NEUTRAL, num_prompt=None, draft_start=0, seed=0):
    return Admission(slot, tokens, num_prompt or len(tokens), sampling, seed, draft_start)


def feature(slot: int, position: int) -> list[float]:
    """Return the feature of one position: zero before the text, distinct within it."""
    return [0.0] * FEATURES if position < 0 else [slot, position + 1.0, slot * 100.0 + position]


def features(slot: int, positions) -> torch.Tensor:
    return torch.tensor([feature(slot, position) for position in positions]).reshape(-1, FEATURES)


def opened(state: SlotState, slots: list[int], num_drafts: int = 1) -> StepRows:
    """Return the rows of a step over chains."""
    tree = TreeTensors.build((chain(num_drafts),) * len(slots), num_drafts + 1, torch.device("cpu"))
    rows = StepRows.empty(tree, state.tables.block_tables.shape[1], None)
    state.open(torch.tensor(slots), tree, rows)
    roots = [int(state.tables.seq_len[slot]) for slot in slots]
    assert rows.positions.tolist() == [list(range(root, root + num_drafts + 1)) for root in roots]
    undrafted = [-1] * num_drafts
    assert rows.draft.token_ids.tolist() == [[int(state.tables.root_token[s]), *undrafted] for s in slots]
    return rows


def emit(state: SlotState, slots: list[int], emitted: list[list[int]], is_penalized: bool = False) -> None:
    """Commit one step in which every slot of `slots` emits the given tokens."""
    depth = max(map(len, emitted))
    padded = torch.tensor([tokens + [-1] * (depth - len(tokens)) for tokens in emitted])
    num_accepted = torch.tensor([len(tokens) - 1 for tokens in emitted])
    verification = Verification(
        path=torch.arange(depth).expand(len(slots), -1).minimum(num_accepted[:, None]),
        num_accepted=num_accepted,
        next_token=torch.tensor([tokens[-1] for tokens in emitted]),
        token_ids=padded,
        is_finite=torch.ones(len(slots), dtype=torch.bool),
    )
    roots = [int(state.tables.seq_len[slot]) for slot in slots]
    garbage = 7e7  # what other nodes carry
    of_nodes = torch.full((len(slots), depth + 1, FEATURES), garbage)
    for row, (slot, root, tokens) in enumerate(zip(slots, roots, emitted, strict=True)):
        of_nodes[row, : len(tokens)] = features(slot, range(root, root + len(tokens)))
    rows = opened(state, slots, depth)
    committed = state.commit(torch.tensor(slots), rows, verification, of_nodes, BLOCK_SIZE, is_penalized)
    for row, (root, tokens) in enumerate(zip(roots, emitted, strict=True)):
        pads = [0] * (depth - len(tokens))
        table = rows.block_tables[row].tolist()
        places = [
            table[min(position // BLOCK_SIZE, len(table) - 1)] * BLOCK_SIZE + position % BLOCK_SIZE
            for position in range(root, root + len(tokens))
        ]
        assert committed.pool_slots.view(len(slots), -1)[row].tolist() == places + pads
        kept = committed.scratch_rows.view(len(slots), -1)[row, : len(tokens)]
        assert kept.tolist() == [row * (depth + 1) + node for node in range(len(tokens))]
        path = verification.path[row].tolist()
        # The draft did not run: it tells nothing of ranks.
        num_ranks = rows.draft.children.shape[2]
        assert committed.answer[row].tolist() == tokens + [-1] * len(pads) + path + [-1, num_ranks, 1]


@dataclass
class Text:
    """The plain model of one slot: all its tokens, and how far the draft's K/V reaches."""

    tokens: list[int]
    draft_len: int
    draft_start: int
    num_pending: int = 1

    @property
    def root(self) -> int:
        return len(self.tokens) - 1


@dataclass
class Walk:
    """Random prefills, drafted steps and plain steps over a few slots, each checked against the model."""

    rng: random.Random
    state: SlotState = field(default_factory=make_state)
    texts: dict[int, Text] = field(default_factory=dict)
    num_holes: int = 0

    def admit(self, slot: int) -> None:
        size = self.rng.choice([1, 2, 5, WINDOW, WINDOW + 1, 20])
        tokens = [self.rng.randrange(VOCAB) for _ in range(size)]
        self.state.admit([admission(slot, tuple(tokens))], EOS)
        start = 0
        while start < size - 1:
            end = min(size - 1, start + self.rng.randint(1, 9))
            where = (torch.tensor(row) for row in ([slot], [start], [0, end - start]))
            self.state.note_prefill(
                *where, torch.tensor(tokens[start:end]), features(slot, range(start, end))
            )
            start = end
        self.texts[slot] = Text(tokens, size - 1, 0)

    def draft(self, slots: list[int]) -> None:
        width = min(max(self.texts[slot].num_pending for slot in slots), WINDOW)
        tree = TreeTensors.build((chain(1),) * len(slots), 2, torch.device("cpu"))
        rows = StepRows.empty(tree, 8, None)
        window = self.state.align(torch.tensor(slots), tree, rows, width)
        assert rows.root_positions.tolist() == [self.texts[slot].root for slot in slots]
        for row, slot in enumerate(slots):
            text = self.texts[slot]
            first = max(text.draft_len, text.root + 1 - width)
            if first > text.draft_len:
                text.draft_start = first
                self.num_holes += 1
            positions = window.positions[row].tolist()
            assert positions == list(range(text.root + 1 - width, text.root + 1))
            assert window.is_pending[row].tolist() == [position >= first for position in positions]
            assert (window.prefix_start[row], window.prefix_end[row]) == (text.draft_start, first)
            pending = window.is_pending[row]
            assert window.token_ids[row][pending].tolist() == text.tokens[first:]
            assert torch.equal(window.features[row][pending], features(slot, range(first - 1, text.root)))
            text.draft_len = text.root + 1

    def commit(self, slots: list[int], max_depth: int) -> None:
        emitted = [
            [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, max_depth + 1))] for _ in slots
        ]
        emit(self.state, slots, emitted)
        for slot, tokens in zip(slots, emitted, strict=True):
            self.texts[slot].tokens += tokens
            self.texts[slot].num_pending += 1
        for slot, text in self.texts.items():
            assert int(self.state.tables.seq_len[slot]) == text.root
            assert int(self.state.tables.root_token[slot]) == text.tokens[-1]

    def step(self) -> None:
        slots = self.rng.sample(sorted(self.texts), self.rng.randint(1, len(self.texts)))
        depth = 0
        if self.rng.random() < 0.4:
            depth = self.rng.randint(1, WINDOW - 1)
            self.draft(slots)
            for slot in slots:
                self.texts[slot].num_pending = depth
        self.commit(slots, depth)


@pytest.mark.parametrize("seed", range(8))
def test_windows_hold_the_true_pairs_after_any_steps(seed):
    walk = Walk(random.Random(seed))
    for slot in (1, 2, 3):
        walk.admit(slot)
    for step in range(120):
        walk.step()
        if step % 30 == 29:
            walk.admit(walk.rng.choice([1, 2, 3]))  # a new owner, over what the last one left
    assert walk.num_holes > 0, "a stretch of plain steps outran the window"


def warped(state: SlotState, slots: list[int], params: list[SamplingParams], logits: torch.Tensor):
    flags = functools.reduce(operator.or_, map(SamplingFlags.of, params))
    sampling = state.sampling(torch.tensor(slots), opened(state, slots), flags)
    return warp(logits, sampling, sampling.output_counts, state.tables.seq_len[slots] + 1), sampling


@pytest.mark.parametrize("sampling", [NEUTRAL, EVERYTHING, SamplingParams(logit_bias=((3, 1.5),))])
def test_a_new_owner_of_a_slot_inherits_nothing(sampling):
    """Beside a row that asks for everything, so that every table is read for both."""
    used, fresh = make_state(), make_state()
    used.admit([admission(1, (1, 2, 3), EVERYTHING, seed=9, draft_start=2)], EOS)
    used.grow([BlockGrowth(1, 0, (3, 4, 5))])
    for _ in range(5):
        emit(used, [1], [[4, 4, 11]], is_penalized=True)
    for state in (used, fresh):
        state.admit([admission(1, (12, 13), sampling, seed=4)], EOS)
        state.admit([admission(2, (1, 2), EVERYTHING)], EOS)
        state.grow([BlockGrowth(1, 0, (6,))])
        emit(state, [1, 2], [[14, 15], [3]], is_penalized=True)
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    params = [sampling, EVERYTHING]
    (found, found_sampling), (expected, expected_sampling) = (
        warped(state, [1, 2], params, logits) for state in (used, fresh)
    )
    assert torch.equal(found, expected)
    assert not torch.equal(found[1], logits[1])
    if sampling is NEUTRAL:
        assert torch.equal(found[0], logits[0])
    assert torch.equal(found_sampling.seed, expected_sampling.seed)
    for name in ("seq_len", "root_token", "draft_len", "draft_start", "block_tables", "features"):
        mine, other = getattr(used.tables, name)[1], getattr(fresh.tables, name)[1]
        # The column behind the ring takes the writes of padding, and nobody reads it.
        assert torch.equal(mine[:WINDOW], other[:WINDOW]) if name == "features" else torch.equal(mine, other)


def test_counts_after_a_preemption_are_those_before_it():
    through, resumed = make_state(), make_state()
    through.admit([admission(1, (1, 2, 3), EVERYTHING)], EOS)
    for tokens in ([4, 4], [9], [4, 3, 1]):
        emit(through, [1], [tokens], is_penalized=True)
    resumed.admit([admission(1, (1, 2, 3, 4, 4, 9, 4, 3, 1), EVERYTHING, num_prompt=3)], EOS)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    (found, sampling), (expected, _) = (warped(s, [1], [EVERYTHING], logits) for s in (resumed, through))
    assert sampling.output_counts[0, 4] == 3
    assert torch.equal(found, expected)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stops_are_masked_up_to_the_minimum_of_outputs(ignore_eos):
    state = make_state()
    params = SamplingParams(min_tokens=3, stop_token_ids=(5, 8), ignore_eos=ignore_eos)
    state.admit([admission(1, (1, 2), params)], EOS)
    masked = []
    for _ in range(5):
        found, _ = warped(state, [1], [params], torch.zeros(1, VOCAB))
        masked.append((found[0] == -torch.inf).nonzero().flatten().tolist())
        emit(state, [1], [[9]])
    assert masked == [[5, 8] if ignore_eos else [5, 6, 8]] * 3 + [[]] * 2


def test_a_row_that_asks_for_nothing_costs_nothing():
    state = make_state()
    state.admit([admission(1, (1, 2))], EOS)
    greedy = SamplingParams(temperature=0.0, top_p=0.5)
    sampling = state.sampling(torch.tensor([1]), opened(state, [1]), SamplingFlags.of(greedy))
    flags = ("is_sampled", "is_truncated", "is_penalized", "is_biased", "has_min_tokens")
    assert not any(getattr(sampling, name) for name in flags)
    assert sampling.output_counts.shape == (1, 0)


def test_blocks_are_appended_to_the_table_of_one_slot():
    state = make_state()
    state.admit([admission(2, (1, 2))], EOS)
    state.grow([BlockGrowth(2, 0, (4, 9))])
    state.grow([BlockGrowth(2, 2, (1,))])
    assert state.tables.block_tables[2].tolist() == [4, 9, 1, 0, 0, 0, 0, 0]
    assert not state.tables.block_tables[[0, 1, 3]].any()
