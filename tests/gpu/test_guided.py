"""Grammars on a CUDA device: the laws of the CPU tests, with captured steps and with uncaptured ones."""

import functools

import pytest

from engine.runner.runner import ModelRunner
from engine.sampling.triton_verify import TritonVerify
from tests.exactness.head import build_drafter
from tests.exactness.test_guided import check_law, mixed, run
from tests.exactness.tiny import EngineShape, build_engine, build_target
from tests.grammar.automaton import AutomatonBackend
from tests.runner.prefill_cases import DeviceReference

pytestmark = pytest.mark.gpu


def build(target, shape: EngineShape, is_captured: bool, has_draft: bool = True):
    runner = functools.partial(
        ModelRunner, open_grammars=AutomatonBackend, verify=TritonVerify(overlap=False)
    )
    backend = DeviceReference() if is_captured else None
    drafter = build_drafter(shape, target, backend) if has_draft else None
    engine = build_engine(target, drafter, shape, runner, backend)
    if is_captured:
        engine.prepare()
    return engine


@pytest.mark.parametrize("is_captured", [True, False])
@pytest.mark.parametrize("sampling", ["greedy", "seeded", "truncated", "penalized"])
@pytest.mark.parametrize("mode", ["off", "chain-3", "tree-8"])
def test_guided_rows_on_a_gpu_keep_their_grammar_and_the_tokens_of_plain_decoding(
    mode, sampling, is_captured
):
    target = build_target().cuda()
    asked = mixed(sampling)
    expected, _ = run(build(target, EngineShape(), is_captured=False, has_draft=False), asked)
    engine = build(target, EngineShape(mode=mode), is_captured)
    outputs, ends = run(engine, asked, num_between=1)
    assert outputs == expected
    check_law(asked, outputs, ends)
    if is_captured and sampling != "penalized":
        assert engine._runner._graphs.num_replays > 0


def test_preempted_rows_on_a_gpu_go_on_where_their_grammar_was():
    target = build_target().cuda()
    asked = mixed("seeded")
    expected, _ = run(build(target, EngineShape(), is_captured=False, has_draft=False), asked)
    shape = EngineShape(mode="tree-8", num_blocks=30, enable_prefix_cache=False)
    engine = build(target, shape, is_captured=True)
    outputs, ends = run(engine, asked)
    assert outputs == expected
    check_law(asked, outputs, ends)
    assert engine.stats().num_preemptions > 0
