"""Law 1 in float32: speculation changes no token, whatever the tree, the batch, the cache or the draft."""

import dataclasses
import random

import pytest
import torch

from engine.batch import StepPlan
from engine.engine import Engine
from engine.layers.rotary import rotate_qkv
from engine.request import Request
from engine.runner.runner import ModelRunner
from engine.runner.step_handle import StepHandle
from engine.stats import EngineStats
from engine.tree.library import TreeLibrary
from engine.tree.topology import TreeTopology
from tests.exactness.oracle import FIRST, LAST, VARYING, AdversarialDrafter, ChooseRank, OracleDrafter
from tests.exactness.tiny import (
    EngineShape,
    build_engine,
    build_target,
    collect,
    prompts,
    request_of,
    run,
)

TREES = ("chain-1", "chain-2", "chain-3", "chain-4", "chain-5", "chain-6", "chain-7")
TREES += ("tree-8", "tree-16", "tree-32", "tree-64")
SAMPLINGS = {"greedy": {}, "seeded": {"temperature": 0.8, "top_p": 0.9}}
DRAFTS = {"oracle": lambda texts: OracleDrafter(texts, VARYING), "adversarial": AdversarialDrafter}
RANKS = {"first": FIRST, "last": LAST, "varying": VARYING}
TARGET = build_target()
LIBRARY = TreeLibrary.search(max_depth=15)


def requests(sampling: str, num: int = 5, shared: int = 0, **params: object) -> list[Request]:
    return [
        request_of(f"r{idx}", prompt, 100 + idx, **SAMPLINGS[sampling], **params)
        for idx, prompt in enumerate(prompts(num, shared=shared))
    ]


_plain: dict[str, dict[str, tuple[int, ...]]] = {}


def plain(asked: list[Request]) -> dict[str, tuple[int, ...]]:
    """Return what plain decoding gives each request alone, without a draft."""
    key = repr(asked)
    if key not in _plain:
        engine = build_engine(TARGET, None, EngineShape(enable_prefix_cache=False))
        _plain[key] = {name: tokens for r in asked for name, tokens in run(engine, [r]).items()}
    return _plain[key]


def oracle(asked: list[Request], choose_rank: ChooseRank) -> OracleDrafter:
    return OracleDrafter(texts(asked), choose_rank)


def texts(asked: list[Request]) -> dict[int, tuple[int, ...]]:
    outputs = plain(asked)
    return {r.sampling.seed: (*r.prompt_token_ids, *outputs[r.request_id]) for r in asked}


def test_plain_decoding_equals_a_dense_forward_of_the_whole_text():
    (asked,) = requests("greedy", num=1)
    tokens = list(asked.prompt_token_ids)
    for _ in range(asked.sampling.max_tokens):
        size = len(tokens)

        def attend(layer_idx, qkv, angles, size=size):
            q, k, v = rotate_qkv(qkv, angles, TARGET.config.num_kv_heads)
            k, v = (x.repeat_interleave(2, dim=1).transpose(0, 1) for x in (k, v))
            scores = q.transpose(0, 1) @ k.transpose(1, 2) * 8**-0.5
            future = torch.ones(size, size, dtype=torch.bool).triu(1)
            return (scores.masked_fill(future, -torch.inf).softmax(-1) @ v).transpose(0, 1)

        output = TARGET(torch.tensor(tokens), torch.arange(size), attend)
        tokens.append(int(TARGET.logits(output.hidden[-1]).argmax()))
    assert plain([asked])["r0"] == tuple(tokens[len(asked.prompt_token_ids) :])


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("tree", TREES)
def test_batch_with_an_oracle_equals_plain_decoding_alone(tree, ranks, sampling):
    asked = requests(sampling)
    engine = build_engine(TARGET, oracle(asked, RANKS[ranks]), EngineShape(mode=tree))
    assert run(engine, asked) == plain(asked)
    stats = engine.stats()
    depth = len(stats.accepted_by_depth)
    assert stats.num_accepted > 0
    assert stats.tokens_per_call > 1.3  # the last sibling of a wide level has few descendants
    assert all(stats.accepted_by_depth), "drafts were accepted at every depth up to the deepest accepted"
    if tree.startswith("chain"):
        assert depth == int(tree.removeprefix("chain-"))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_one_request_alone_equals_plain_decoding(drafts, tree, sampling):
    asked = requests(sampling, num=1)
    engine = build_engine(TARGET, DRAFTS[drafts](texts(asked)), EngineShape(mode=tree))
    assert run(engine, asked) == plain(asked)
    assert_drafted(engine.stats(), drafts)


def assert_drafted(stats: EngineStats, drafts: str) -> None:
    """Drafts were made; those of an oracle were accepted, and none of an adversary."""
    assert stats.num_drafted > 0
    assert (stats.num_accepted > 0) == (drafts == "oracle"), stats.num_accepted


class CountingRunner(ModelRunner):
    """Counts the prefill chunks of each admission."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.num_chunks: list[int] = []
        self.admission_idx: dict[int, int] = {}

    def launch(self, plan: StepPlan) -> StepHandle:
        for admission in plan.admissions:
            self.admission_idx[admission.slot] = len(self.num_chunks)
            self.num_chunks.append(0)
        for chunk in plan.chunks:
            self.num_chunks[self.admission_idx[chunk.slot]] += 1
        return super().launch(plan)


class ShufflingRunner(CountingRunner):
    """Gives every row of every step a topology of its own, no deeper than planned."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.topologies: list[set[TreeTopology]] = []

    def launch(self, plan: StepPlan) -> StepHandle:
        generator = random.Random(plan.step_idx)
        rows = tuple(row._replace(topology=_random_tree(generator, row.topology.depth)) for row in plan.rows)
        self.topologies.append({row.topology for row in rows})
        return super().launch(dataclasses.replace(plan, rows=rows))


def _random_tree(generator: random.Random, max_depth: int) -> TreeTopology:
    """Return a tree of 1 to 64 nodes: each level hangs its nodes on the level above, in order."""
    parents, level = [-1], [0]
    for _ in range(generator.randint(0, max_depth)):
        width = min(generator.randint(1, 8), 64 - len(parents))
        hung = sorted(generator.choice(level) for _ in range(width))
        level = list(range(len(parents), len(parents) + width))
        parents += hung
        if not level:
            break
    return TreeTopology("random", tuple(parents))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("ranks", RANKS)
def test_topologies_that_change_by_row_and_step_change_nothing(ranks, sampling):
    asked = requests(sampling, num=7)
    engine = build_engine(TARGET, oracle(asked, RANKS[ranks]), EngineShape(mode="tree-64"), ShufflingRunner)
    assert run(engine, asked) == plain(asked)
    assert_shuffled(engine)
    assert engine.stats().num_accepted > 0


def assert_shuffled(engine: Engine) -> None:
    topologies = engine._runner.topologies
    assert len(set().union(*topologies)) > 10
    assert max(len(trees) for trees in topologies) > 2


def crowd() -> list[Request]:
    """Return greedy and seeded requests by turns that begin alike, the first much longer than the rest."""
    rest = [*prompts(1, length=120, seed=1), *prompts(5, length=5)]
    (common,) = prompts(1, length=18, seed=2)
    return [
        request_of(f"r{idx}", common + prompt, 100 + idx, **[*SAMPLINGS.values()][idx % 2], max_tokens=20)
        for idx, prompt in enumerate(rest)
    ]


def run_late(engine: Engine, asked: list[Request]) -> dict[str, tuple[int, ...]]:
    """Run requests of which one arrives with every second step."""
    outputs: dict[str, list[int]] = {request.request_id: [] for request in asked}
    waiting = list(asked)
    while waiting or engine.has_work:
        if waiting:
            engine.add(waiting.pop(0))
        for _ in range(2):
            for delta in engine.step():
                collect(outputs, delta)
    return {name: tuple(tokens) for name, tokens in outputs.items()}


def assert_crowded(engine: Engine) -> None:
    """Prefixes were hit, prompts were cut, sequences were preempted, and every block came back."""
    stats = engine.stats()
    assert stats.num_prefix_hit_tokens > 0
    assert max(engine._runner.num_chunks) > 1
    assert stats.num_preemptions > 0
    assert stats.num_held_blocks == 0
    assert stats.num_free_blocks + stats.num_cached_blocks == engine.facts.num_blocks


def crowded_shape(tree: str, block_size: int = 4) -> EngineShape:
    """Return an engine too small for `crowd`, whose step holds two trees and a part of the long prompt."""
    num_nodes = 1 if tree == "off" else LIBRARY.get(tree).num_nodes
    return EngineShape(
        mode=tree,
        block_size=block_size,
        num_blocks=174 // block_size,
        max_num_seqs=7,
        max_batched_tokens=2 * num_nodes + 30,
    )


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_hits_chunks_and_preemption_together_change_nothing(drafts, tree):
    asked = crowd()
    engine = build_engine(TARGET, DRAFTS[drafts](texts(asked)), crowded_shape(tree), CountingRunner)
    assert run_late(engine, asked) == plain(asked)
    assert_crowded(engine)
    assert_drafted(engine.stats(), drafts)


def test_hits_chunks_and_preemption_together_change_nothing_without_drafts():
    asked = crowd()
    engine = build_engine(TARGET, None, crowded_shape("off"), CountingRunner)
    assert run_late(engine, asked) == plain(asked)
    assert_crowded(engine)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("drafts", DRAFTS)
def test_hits_chunks_and_preemption_change_nothing_while_trees_change(drafts, block_size):
    asked = crowd()
    shape = crowded_shape("tree-32", block_size)
    engine = build_engine(TARGET, DRAFTS[drafts](texts(asked)), shape, ShufflingRunner)
    assert run_late(engine, asked) == plain(asked)
    assert_crowded(engine)
    assert_shuffled(engine)
    assert_drafted(engine.stats(), drafts)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_requests_with_trees_of_their_own_share_a_batch(sampling):
    trees = ("off", "chain-1", "chain-5", "tree-8", "tree-64", "auto")
    asked = [
        dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, speculation=tree))
        for r, tree in zip(requests(sampling, num=6), trees, strict=True)
    ]
    plainly = [
        dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, speculation="auto")) for r in asked
    ]
    engine = build_engine(TARGET, oracle(plainly, LAST), EngineShape(mode="chain-3"))
    assert run(engine, asked) == plain(plainly)
    stats = engine.stats()
    assert stats.num_accepted > 0
    assert {name for name, _ in stats.steps_by_tree} >= set(trees) - {"auto"} | {"chain-3"}


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"frequency_penalty": 2.0},
        {"logit_bias": ((7, 6.0), (8, -6.0))},
        {"min_p": 0.15},
        {"top_k": 5},
        {"min_tokens": 14, "ignore_eos": False, "logit_bias": ((5, 8.0),)},
        {"stop_token_ids": tuple(range(30, 60))},
        {"ignore_eos": False, "logit_bias": ((5, 4.0),)},
    ],
    ids=lambda params: "-".join(params),
)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_parameter_acts_as_in_plain_decoding(params, sampling):
    asked = requests(sampling, **params)
    engine = build_engine(TARGET, oracle(asked, VARYING), EngineShape(mode="tree-16"))
    assert run(engine, asked) == plain(asked)
    assert engine.stats().num_accepted > 0
    is_neutral = sampling == "greedy" and not params.keys().isdisjoint({"min_p", "top_k"})
    assert (plain(asked) == plain(requests(sampling))) == is_neutral, "a parameter without effect was dropped"


@pytest.mark.parametrize("max_tokens", range(1, 13))
@pytest.mark.parametrize("tree", ["chain-1", "chain-4", "chain-7"])
def test_max_tokens_is_met_exactly(max_tokens, tree):
    asked = requests("greedy", num=3)
    short = [
        dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, max_tokens=max_tokens)) for r in asked
    ]
    engine = build_engine(TARGET, oracle(asked, FIRST), EngineShape(mode=tree))
    assert run(engine, short) == {name: tokens[:max_tokens] for name, tokens in plain(asked).items()}
    stats, depth = engine.stats(), LIBRARY.get(tree).depth
    num_calls = -(-max_tokens // (depth + 1))
    assert stats.num_calls == len(asked) * num_calls, "every draft was accepted"
    assert stats.num_accepted >= len(asked) * (max_tokens - num_calls)


@pytest.mark.parametrize("tree", ["chain-7", "tree-64"])
def test_generation_runs_to_the_last_position_of_the_model(tree):
    (prompt,) = prompts(1, length=180)
    asked = [request_of("r0", prompt, 100, max_tokens=256 - 180)]
    engine = build_engine(TARGET, oracle(asked, FIRST), EngineShape(mode=tree))
    outputs = run(engine, asked)
    assert outputs == plain(asked)
    assert len(outputs["r0"]) == 76
    assert engine.stats().num_accepted > 0


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_prompt_of_one_token_is_its_own_root(sampling):
    asked = [request_of(f"r{idx}", (10 + idx,), 100 + idx, **SAMPLINGS[sampling]) for idx in range(3)]
    engine = build_engine(TARGET, oracle(asked, LAST), EngineShape(mode="tree-8"))
    assert run(engine, asked) == plain(asked)
    assert engine.stats().num_accepted > 0


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_blocks_of_every_size_give_the_same_tokens(block_size, sampling):
    asked = requests(sampling, num=3)
    engine = build_engine(TARGET, oracle(asked, VARYING), EngineShape(mode="tree-16", block_size=block_size))
    assert run(engine, asked) == plain(asked)
    assert engine.stats().num_accepted > 0


EXTRAS = (
    {"logit_bias": ((7, 9.0), (8, -9.0))},
    {},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.8},
    {"min_p": 0.1, "top_k": 9},
    {"min_tokens": 20, "ignore_eos": False, "stop_token_ids": (30, 31, 32)},
    {},
    {"temperature": 1.3},
    {"presence_penalty": 1.5, "logit_bias": ((9, 5.0),), "min_tokens": 3},
)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8])
@pytest.mark.parametrize("mode", ["off", "chain-3", "tree-16"])
def test_slots_that_change_owners_carry_nothing_over(mode, max_num_seqs):
    """Eight requests with parameters of their own, of different lengths, over few slots."""
    asked = [
        request_of(
            f"r{idx}",
            prompts(8)[idx],
            100 + idx,
            **({"temperature": 0.8, "top_p": 0.9, "max_tokens": 20 + 3 * (idx % 3)} | extra),
        )
        for idx, extra in enumerate(EXTRAS)
    ]
    drafter = None if mode == "off" else oracle(asked, VARYING)
    engine = build_engine(TARGET, drafter, EngineShape(mode=mode, max_num_seqs=max_num_seqs))
    assert run(engine, asked) == plain(asked)
    assert (engine.stats().num_accepted > 0) == (mode != "off")
