"""The draft's pages hold pairs of true features for every committed token, however the text came to be."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from engine.draft.drafter import Drafter
from engine.engine import Engine
from engine.kvcache.tree_scratch import TreeScratch
from tests.exactness.head import build_drafter
from tests.exactness.tiny import EngineShape, build_engine, build_target, prompts, request_of, run

TARGET = build_target()


@dataclass
class Watched:
    """A drafter's engine and what was seen of it: each sequence's blocks, each step's windows and drafts."""

    engine: Engine
    drafter: Drafter
    block_ids: dict[str, list[int]] = field(default_factory=dict)
    windows: list[tuple[int, int]] = field(default_factory=list)  # pending positions, first position readable
    drafts: list[list[list[int]]] = field(default_factory=list)
    pairs: list[tuple[list[int], list[bool]]] = field(default_factory=list)  # positions, and whether stored

    def __post_init__(self) -> None:
        align, draft, fill = self.drafter._align, self.drafter.draft, self.drafter.fill

        def watch_window(window):
            self.windows.append((int(window.is_pending[0].sum()), int(window.prefix_start[0])))
            return align(window)

        def watch_pairs(pairs):
            self.pairs.append((pairs.positions.tolist(), (pairs.slots > 0).tolist()))
            self.windows.append((int((pairs.slots > 0).sum()), int(pairs.layout.window_starts[0])))
            fill(pairs)

        def watch_draft(window, tree, noise, output):
            draft(window, tree, noise, output)
            self.drafts.append(output.token_ids.tolist())

        self.drafter._align, self.drafter.draft, self.drafter.fill = watch_window, watch_draft, watch_pairs

    def step(self, outputs: dict[str, list[int]], tree: str | None = None) -> None:
        if tree is not None:
            self.engine.switch_speculation(tree)
        for delta in self.engine.step():
            outputs[delta.request_id] += delta.token_ids
        for progress in self.engine._scheduler._running:
            sequence = progress.sequence
            self.block_ids[sequence.request.request_id] = list(sequence.block_ids)

    def cache(self, name: str, num_positions: int) -> torch.Tensor:
        """Return the draft's K and V of a sequence, [2, L, num_positions, Hkv, D]; its blocks may be free by
        now, but nobody took them.
        """
        pool = self.drafter.pool
        blocks = torch.tensor(self.block_ids[name])
        return torch.stack([pages[:, blocks].flatten(1, 2)[:, :num_positions] for pages in (pool.k, pool.v)])


def watched(shape: EngineShape) -> Watched:
    drafter = build_drafter(shape, TARGET)
    return Watched(build_engine(TARGET, drafter, shape), drafter)


def finish(seen: Watched, asked) -> tuple[int, ...]:
    outputs = {asked.request_id: []}
    seen.engine.add(asked)
    while seen.engine.has_work:
        seen.step(outputs)
    return tuple(outputs[asked.request_id])


def fresh_cache(text: tuple[int, ...], num_positions: int) -> torch.Tensor:
    """Return the draft's K and V after one prefill of the whole text."""
    seen = watched(EngineShape(mode="off", enable_prefix_cache=False))
    finish(seen, request_of("fresh", text, 100, max_tokens=1))
    return seen.cache("fresh", num_positions)


def assert_same_cache(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.abs().amax((2, 3, 4)).min() > 0.1, "there is something to compare"
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("mode", "window", "budget"),
    [
        ("chain-3", 16, 256),
        ("tree-16", 16, 256),
        ("chain-7", 8, 256),
        ("tree-8", 16, 11),
        ("chain-2", 16, 10),
    ],
)
def test_the_draft_cache_equals_that_of_a_fresh_prefill_of_the_same_text(mode, window, budget):
    (prompt,) = prompts(1, length=37)
    seen = watched(
        EngineShape(mode=mode, feature_window=window, max_batched_tokens=budget, enable_prefix_cache=False)
    )
    text = (*prompt, *finish(seen, request_of("r0", prompt, 100)))
    assert seen.engine.stats().num_drafted > 0
    # The last tokens were emitted by the last step, and never were a root.
    num_positions = len(text) - 8
    assert_same_cache(seen.cache("r0", num_positions), fresh_cache(text, num_positions))


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_draft_cache_behind_a_prefix_hit_equals_a_fresh_one(block_size):
    (prompt,) = prompts(1, length=33)
    seen = watched(EngineShape(mode="chain-3", block_size=block_size))
    text = (*prompt, *finish(seen, request_of("first", prompt, 100)))
    longer = (*text[:45], 40, 41, 42)
    text = (*longer, *finish(seen, request_of("second", longer, 101)))
    assert seen.engine.stats().num_prefix_hit_tokens >= 45 - 2 * block_size
    num_positions = len(text) - 4
    assert_same_cache(seen.cache("second", num_positions), fresh_cache(text, num_positions))


def test_a_prefix_hit_runs_its_last_token_again_without_storing_it():
    (prompt,) = prompts(1, length=22)
    seen = watched(EngineShape(mode="chain-3", block_size=4))
    finish(seen, request_of("first", prompt, 100, max_tokens=1))
    assert seen.pairs == [(list(range(22)), [True] * 22)]
    finish(seen, request_of("second", prompt, 101, max_tokens=1))
    assert seen.pairs[1:] == [([19, 20, 21], [False, True, True])]


@pytest.mark.parametrize("num_off", [1, 4, 7])
def test_plain_steps_within_the_window_leave_no_hole(num_off):
    (prompt,) = prompts(1, length=20)
    seen = watched(EngineShape(mode="off", feature_window=8, enable_prefix_cache=False))
    seen.engine.add(request_of("r0", prompt, 100, max_tokens=60))
    outputs = {"r0": []}
    for _ in range(5):
        for tree in ("chain-3", "chain-3", *("off",) * num_off):
            seen.step(outputs, tree)
    seen.step(outputs, "chain-3")
    text = (*prompt, *outputs["r0"])
    num_positions = len(text) - 1  # up to the last known root
    assert all(start == 0 for _, start in seen.windows)
    assert_same_cache(seen.cache("r0", num_positions), fresh_cache(text, num_positions))


def test_off_rows_catch_up_within_the_window_and_forget_beyond_it():
    (prompt,) = prompts(1, length=20)
    seen = watched(EngineShape(mode="chain-3", enable_prefix_cache=False, feature_window=8))
    seen.engine.add(request_of("r0", prompt, 100, max_tokens=60))
    outputs = {"r0": []}
    for step in range(40):
        # Plain for three steps, then for twelve: less and more than the window.
        seen.step(outputs, "off" if 4 <= step < 7 or 12 <= step < 24 else "chain-3")
    asked = [request_of("r0", prompt, 100, max_tokens=60)]
    plain = run(build_engine(TARGET, None, EngineShape()), asked)["r0"]
    assert tuple(outputs["r0"]) == plain[: len(outputs["r0"])]
    assert len(outputs["r0"]) >= 38
    pending = [num for num, _ in seen.windows[1:]]
    assert pending[4] in range(4, 8), "three plain steps and the root are filled in one pass"
    assert pending[9] == 8, "no more than the window is filled"
    starts = [start for _, start in seen.windows]
    assert starts[9] == 0
    assert starts[10] > 20, "the hole is outside the window from then on"
    # What follows the hole is as true as before it; the second layer has seen a shorter prefix.
    text = (*prompt, *outputs["r0"])
    found, expected = seen.cache("r0", len(text) - 1), fresh_cache(text, len(text) - 1)
    torch.testing.assert_close(found[:, 0, starts[10] :], expected[:, 0, starts[10] :], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found[:, 0, starts[10] - 1], expected[:, 0, starts[10] - 1])


@pytest.mark.parametrize("budget", [*range(2, 12), 18, 37, 38])
def test_chunks_of_every_size_leave_the_same_cache_features_and_drafts(budget):
    (prompt,) = prompts(1, length=37)
    states = []
    for max_batched_tokens in (budget, 256):
        shape = EngineShape(mode="chain-3", max_num_seqs=1, max_batched_tokens=max_batched_tokens)
        seen = watched(shape)
        finish(seen, request_of("r0", prompt, 100, max_tokens=2))
        # The last positions of the prompt, which no later position has taken the place of.
        features = seen.engine._runner._state.tables.features[1, torch.arange(30, 36) % shape.feature_window]
        states.append((seen.cache("r0", 37), features, seen.windows))
    (cache, features, windows), (whole, whole_features, whole_windows) = states
    assert_same_cache(cache, whole)
    torch.testing.assert_close(features, whole_features, rtol=1e-4, atol=1e-5)
    assert features.abs().amax(1).min() > 0.1
    assert len(windows) > len(whole_windows) or budget >= 37


def fill_pages(seen: Watched, noise: float) -> None:
    """Fill every page with noise, and every scratch to come, as if others had used them before."""
    torch.manual_seed(11)

    def fill(k: torch.Tensor, v: torch.Tensor) -> None:
        for pages in (k, v):
            pages.copy_(torch.randn(pages.shape) * noise)

    def noisy_scratch(make: Callable[[int], TreeScratch]) -> Callable[[int], TreeScratch]:
        def scratch(num_tokens: int) -> TreeScratch:
            made = make(num_tokens)
            fill(made.k, made.v)
            return made

        return scratch

    for pool in (seen.drafter.pool, seen.engine._runner._pool):
        fill(pool.k, pool.v)
        pool.scratch = noisy_scratch(pool.scratch)


def play(noise: float) -> tuple[dict[str, list[int]], list[list[list[int]]], Watched]:
    """Run a scene with hits, holes, chunks and preemptions over pages that begin with noise."""
    rng = random.Random(0)
    shape = EngineShape(mode="off", num_blocks=40, max_num_seqs=4, max_batched_tokens=24, feature_window=6)
    seen = watched(shape)
    fill_pages(seen, noise)
    shared = prompts(1, length=21, seed=5)[0]
    asked = [
        request_of(f"r{idx}", (*shared[: rng.choice([0, 8, 21])], *prompt), 100 + idx, temperature=0.8)
        for idx, prompt in enumerate(prompts(9, length=2))
    ]
    outputs = {request.request_id: [] for request in asked}
    for request in asked:
        seen.engine.add(request)
        stretch = rng.choice([1, 3, 9])
        tree = rng.choice(["off", "off", "chain-2", "tree-8"])
        for _ in range(stretch):
            seen.step(outputs, tree)
    while seen.engine.has_work:
        seen.step(outputs, rng.choice(["off", "chain-5", "tree-8"]))
    return outputs, seen.drafts, seen


def test_nothing_is_read_that_was_not_written():
    """What pages held before cannot be seen in any draft, nor in any output."""
    outputs, drafts, seen = play(noise=0.0)
    assert play(noise=3.0)[:2] == (outputs, drafts)
    stats = seen.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_prefix_hit_tokens > 0
    assert any(start > 0 for _, start in seen.windows), "a hole was left out"
    assert len(drafts) > 20


def test_a_hit_on_blocks_without_draft_reads_none_of_their_draft_cache():
    (prompt,) = prompts(1, length=13)
    drafts = []
    for noise in (0.0, 3.0):
        seen = watched(EngineShape(mode="off", feature_window=4))
        fill_pages(seen, noise)
        text = (*prompt, *finish(seen, request_of("plain", prompt, 100, max_tokens=40)))
        seen.engine.switch_speculation("chain-3")
        seen.windows.clear()
        finish(seen, request_of("drafted", text[:50], 101))
        assert seen.engine.stats().num_prefix_hit_tokens >= 40
        assert min(start for _, start in seen.windows) >= 40, "plain steps filled no draft cache"
        drafts.append(seen.drafts)
    assert drafts[0] == drafts[1]
    assert len(drafts[0]) > 5


@pytest.mark.parametrize("mode", ["chain-1", "chain-5", "tree-8", "tree-64"])
@pytest.mark.parametrize("draft_mode", ["greedy", "sampled"])
def test_a_random_head_changes_no_token(mode, draft_mode):
    asked = [request_of(f"r{idx}", prompt, 100 + idx) for idx, prompt in enumerate(prompts(5))]
    plain = run(build_engine(TARGET, None, EngineShape(mode="off")), asked)
    shape = EngineShape(mode=mode, draft_mode=draft_mode)
    engine = build_engine(TARGET, build_drafter(shape, TARGET), shape)
    assert run(engine, asked) == plain
    assert engine.stats().num_drafted > 0


def test_sampled_drafts_of_sampled_requests_end_with_answers_of_full_length():
    asked = [
        request_of(f"r{idx}", prompt, 100 + idx, temperature=1.0, top_p=0.9)
        for idx, prompt in enumerate(prompts(5))
    ]
    shape = EngineShape(mode="tree-8", draft_mode="sampled")
    engine = build_engine(TARGET, build_drafter(shape, TARGET), shape)
    outputs = run(engine, asked)
    assert all(len(tokens) == 24 for tokens in outputs.values())
    assert engine.stats().num_accepted > 0
    again = build_engine(TARGET, build_drafter(shape, TARGET), shape)
    assert run(again, asked) == outputs, "the same engine and seeds give the same answers"
