"""What a launch asks of its rows, and that nothing of it outlives the owner of a slot."""

import dataclasses

from engine.batch import Admission, BlockGrowth, DecodeRow, StepPlan
from engine.request import SamplingParams
from engine.runner.launch_rows import LaunchRows
from engine.speculation import SamplingFlags, TreeShape
from engine.tree.topology import chain, root_only
from tests.exactness.tiny import EngineShape, build_engine, build_target


def test_it_holds_what_the_rows_need_together():
    flags = [SamplingFlags(is_biased=True), SamplingFlags(), SamplingFlags(is_sampled=True)]
    rows = (DecodeRow(2, chain(2)), DecodeRow(1, root_only()))
    found = LaunchRows.of(rows, flags)
    expected = LaunchRows(
        rows=rows,
        slots=(2, 1),
        topologies=(chain(2), root_only()),
        shape=TreeShape(num_nodes=3, widths=(1, 1), max_rank=0),
        flags=SamplingFlags(is_sampled=True),
    )
    assert found == expected


def test_a_slot_is_sampled_as_its_new_owner_asks_though_the_rows_look_the_same():
    runner = build_engine(build_target(), None, EngineShape())._runner
    greedy = SamplingParams(temperature=0.0)
    admission = Admission(1, (3, 4, 5), 3, greedy, seed=0, draft_start=0)
    growth = BlockGrowth(1, 0, (1,))
    plan = StepPlan(0, (admission,), (growth,), (), (DecodeRow(1, root_only()),), 2)
    (token_id,) = runner.launch(plan).collect().rows[0].token_ids
    wanted = (token_id + 1) % 8
    biased = dataclasses.replace(greedy, logit_bias=((wanted, 100.0),))
    plan = dataclasses.replace(plan, admissions=(dataclasses.replace(admission, sampling=biased),))
    assert runner.launch(plan).collect().rows[0].token_ids == (wanted,)
