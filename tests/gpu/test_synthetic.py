"""A synthetic engine on a GPU: captured steps accept as the profile says, behind contexts that are cached."""

import dataclasses
import time

import pytest
import torch

from app.bench_cells import Cell, Effort, measure_cell
from engine.precision import PrecisionConfig
from engine.request import Request, SamplingParams
from engine.runner.rates import MachineRates
from engine.synthetic import SyntheticEngine, SyntheticWeights
from engine.tree.library import DEFAULT_PROFILE
from tests.synthetic_cases import TINY, engine_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="steps are captured on CUDA only"),
]

MODEL = dataclasses.replace(TINY, vocab_size=4096, hidden_size=256, intermediate_size=512, head_dim=64)
BATCH, CONTEXT = 24, 256


def make_bench(**changes):
    config = engine_config(
        device="cuda",
        dtype="bfloat16",
        block_size=64,
        num_blocks=400,
        max_num_seqs=BATCH,
        max_num_waiting=BATCH,
        max_batched_tokens=1024,
        max_model_len=1024,
        **changes,
    )
    weights = SyntheticWeights.create("tiny", MODEL, config)
    return SyntheticEngine(config, weights, DEFAULT_PROFILE, [(8, 4), (16, 5)])


@pytest.fixture(scope="module")
def bench():
    return make_bench()


@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("tree", ["off", "chain-3", "tree-16"])
def test_tokens_per_call_are_those_of_the_profile(bench, tree, temperature, is_captured):
    check_profile(bench, tree, temperature, is_captured)


@pytest.mark.parametrize("part", [{"target": "fp8"}, {"draft": "int4-ffn"}, {"cache": "fp8"}], ids=str)
def test_so_they_are_in_few_bits(part):
    bench = make_bench(precision=PrecisionConfig(**part))
    for tree in ("off", "tree-16"):
        check_profile(bench, tree, 0.0, is_captured=True)


def check_profile(bench, tree, temperature, is_captured):
    if is_captured:
        bench.engine.capture(tree, BATCH)
    prompts = bench.random_prompts(BATCH, CONTEXT)
    bench.cache(prompts)
    for row, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=temperature, top_p=0.9, max_tokens=300, seed=row, ignore_eos=True, speculation=tree
        )
        bench.engine.add(Request(f"row-{row}", prompt, params))
    deltas = []
    while bench.engine.has_work:
        deltas += bench.engine.step()
    assert {delta.message for delta in deltas} == {None}
    assert {delta.num_prefix_hits for delta in deltas} == {CONTEXT}
    stats = bench.engine.stats()
    assert stats.num_held_blocks == 0
    assert stats.num_free_blocks + stats.num_cached_blocks == bench.engine.facts.num_blocks
    whole = [delta for delta in deltas if delta.finish_reason is None]  # the last of each may be cut
    expected = bench.expected_tokens_per_call(tree)
    found = sum(len(delta.token_ids) for delta in whole) / len(whole)
    assert found == pytest.approx(expected, abs=3 * (expected / len(whole)) ** 0.5)


def test_a_cell_is_measured_with_a_trace(bench):
    cell = Cell(CONTEXT, BATCH, 0.0, 1.0, ("off", "chain-3"))
    results = measure_cell(
        bench, cell, MachineRates(4e12, 7e14), Effort(1, 0.0, is_traced=True), time.perf_counter
    )
    for result in results:
        assert result.trace is not None
        assert 0 <= result.trace.idle_share < 1
        assert result.trace.num_launches > 10
        assert result.ms_host > 0
        assert 0 < result.ms_limit < result.ms_per_step
