"""Law 1 while the tree changes at every step and differs from row to row, and what such steps tell."""

import random
from collections import defaultdict

import pytest

from engine.batch import NUM_RANKS, Load
from engine.config import SpeculationConfig
from engine.dispatcher.calibration import CalibrationPlan, calibrate
from engine.dispatcher.create import create_dispatcher
from engine.dispatcher.static import StaticDispatcher
from engine.row_kind import RowKind
from engine.tree.library import DEFAULT_PROFILE, TreeLibrary
from tests.exactness.head import build_drafter
from tests.exactness.tiny import EngineShape, build_engine, build_target, prompts, request_of, run

TARGET = build_target()
LIBRARY = TreeLibrary.search(max_depth=15)
ARMS = ("off", "chain-1", "chain-2", "tree-8", "tree-16", "chain-5", "tree-64")
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1},
}


class AtRandom(StaticDispatcher):
    """Chooses any arm at any step, and keeps what it is told."""

    def __init__(self, seed: int, arms: tuple[str, ...] = ARMS) -> None:
        super().__init__(SpeculationConfig(mode="off"), (), LIBRARY)
        self._source, self._arms = random.Random(seed), arms
        self.seen = []

    def choose(self, load: Load):
        return LIBRARY.get(self._source.choice(self._arms))

    def observe(self, stats):
        self.seen.append(stats)


def drafting_engine(dispatcher, **shape):
    shape = EngineShape(max_batched_tokens=512, **shape)
    engine = build_engine(TARGET, build_drafter(shape, TARGET), shape)
    engine._dispatcher = dispatcher
    return engine


def asked_of(sampling, own=("auto",), num=4, max_tokens=28):
    return [
        request_of(
            f"r{idx}", prompt, 100 + idx, max_tokens=max_tokens, speculation=own[idx % len(own)], **sampling
        )
        for idx, prompt in enumerate(prompts(num))
    ]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("own", [("auto",), ("auto", "tree-8", "off", "chain-5")], ids=["one", "mixed"])
@pytest.mark.parametrize("seed", range(2))
def test_arms_that_change_every_step_and_differ_by_row_change_no_token(sampling, own, seed):
    plain = run(build_engine(TARGET, None, EngineShape(mode="off")), asked_of(sampling))
    dispatcher = AtRandom(seed)
    engine = drafting_engine(dispatcher)
    assert run(engine, asked_of(sampling, own)) == plain
    used = [tuple(sorted({row.topology.name for row in stats.rows})) for stats in dispatcher.seen]
    assert len(set(used)) >= 5, "arms did change"
    assert own == ("auto",) or any(len(names) > 1 for names in used), "and rows did differ"
    assert engine.stats().num_accepted > 0


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_the_dispatcher_that_learns_changes_no_token(sampling):
    asked = asked_of(sampling, max_tokens=60)
    plain = run(build_engine(TARGET, None, EngineShape(mode="off")), asked)

    def time_step(batch, tree, context):
        return 1e-3 * (4 + 0.1 * batch * tree.num_nodes + 0.2 * tree.depth)

    trees = [LIBRARY.get(name) for name in ARMS]
    plan = CalibrationPlan(batches=(1, 4, 8), contexts=(64,))
    table = calibrate(trees, plan, time_step, lambda batch: 0.0, lambda: 0.0)
    static = StaticDispatcher(SpeculationConfig(), (), LIBRARY)
    dispatcher = create_dispatcher(
        SpeculationConfig(), static, LIBRARY, table, DEFAULT_PROFILE, block_size=4, max_num_seqs=8
    )
    engine = drafting_engine(dispatcher)
    assert run(engine, asked) == plain
    stats = engine.stats()
    assert stats.dispatch.state is not None
    assert {total.name for total in stats.dispatch.totals} > {"off"}
    assert all(total.tokens_per_second > 0 for total in stats.dispatch.totals)


def first_ranks(arms, seed=0):
    """Return by (sequence, position) the draft's rank of the token there, where a root was drafted before
    it.
    """
    dispatcher = AtRandom(seed, arms)
    run(drafting_engine(dispatcher), asked_of(SAMPLINGS["greedy"]))
    found, positions = {}, defaultdict(int)
    for stats in dispatcher.seen:
        for row in stats.rows:
            rank = row.path_ranks[0] if row.path_ranks else row.next_rank
            for idx in row.sequence_idxs:
                if rank is not None:
                    found[idx, positions[idx]] = rank
                positions[idx] += row.num_accepted + 1
    return found


def test_trees_of_any_width_see_the_same_rank_of_the_same_token():
    """The draft's distribution at a root follows from the text alone."""
    reference = first_ranks(("chain-1",))
    assert set(reference.values()) > {0, NUM_RANKS}, "hits and misses"
    for arms in (("tree-16",), ("tree-8", "chain-5", "tree-64")):
        found = first_ranks(arms)
        shared = found.keys() & reference.keys()
        assert len(shared) > 20
        assert {key: found[key] for key in shared} == {key: reference[key] for key in shared}


def test_what_rows_tell_fits_their_trees():
    dispatcher = AtRandom(1)
    engine = drafting_engine(dispatcher)
    asked = asked_of({"temperature": 0.5})
    run(engine, asked)
    rows = [row for stats in dispatcher.seen for row in stats.rows]
    assert {row.kind for row in rows} == {RowKind(temperature_class=1)}
    assert {idx for row in rows for idx in row.sequence_idxs} == {0, 1, 2, 3}
    for stats in dispatcher.seen:
        depth = max((row.topology.depth for row in stats.rows), default=0)
        for row in stats.rows:
            node = 0
            for rank in row.path_ranks:
                node = row.topology.children[node][rank]
            assert len(row.path_ranks) == row.num_accepted
            is_drafted = row.num_accepted < depth
            assert (row.next_rank is not None) == is_drafted, "the draft runs on every level but the last"
            if is_drafted:
                num_children = len(row.topology.children[node])
                assert num_children <= row.next_rank <= NUM_RANKS, "a child of that rank would have been kept"
