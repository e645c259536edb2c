"""A synthetic engine finds its contexts in the cache, accepts as its profile says, and keeps every block."""

import pytest

from engine.errors import CapacityError, ConfigError
from engine.request import Request, SamplingParams
from engine.runner.synthetic import shape_of
from engine.synthetic import SyntheticEngine, SyntheticWeights, predict_bytes
from engine.tree.library import DEFAULT_PROFILE
from tests.synthetic_cases import TINY, engine_config

BATCH, CONTEXT = 8, 64


def make_bench() -> SyntheticEngine:
    config = engine_config()
    weights = SyntheticWeights.create("tiny", TINY, config)
    return SyntheticEngine(config, weights, DEFAULT_PROFILE, [(8, 4)])


@pytest.fixture(scope="module")
def bench():
    return make_bench()


def answer(bench, prompts, tree, max_tokens, seed=0, **sampling):
    """Run the prompts to their end; return (deltas, stats gained)."""
    before = bench.engine.stats()
    for row, prompt in enumerate(prompts):
        params = SamplingParams(
            **{"temperature": 0.0, **sampling},
            max_tokens=max_tokens,
            seed=seed + row,
            ignore_eos=True,
            speculation=tree,
        )
        bench.engine.add(Request(f"row-{row}", prompt, params))
    deltas = []
    while bench.engine.has_work:
        deltas += bench.engine.step()
    after = bench.engine.stats()
    assert after.num_held_blocks == 0
    assert after.num_free_blocks + after.num_cached_blocks == bench.engine.facts.num_blocks
    return deltas, after.num_steps - before.num_steps


@pytest.mark.parametrize("tree", ["off", "chain-3", "tree-8"])
def test_nothing_but_the_last_cached_token_is_prefilled(bench, tree):
    prompts = bench.random_prompts(BATCH, CONTEXT)
    for _ in range(2):  # a run leaves blocks of its own in the index
        bench.cache(prompts)
        assert bench.engine.stats().num_cached_blocks == BATCH * CONTEXT // 8
        deltas, num_steps = answer(bench, prompts, tree, 1)
        # One step holds it all, prefill too; a second one was launched before the first was collected.
        assert num_steps <= 2
        assert [delta.num_prefix_hits for delta in deltas] == [CONTEXT] * BATCH


@pytest.mark.parametrize("tree", ["chain-3", "tree-8"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_tokens_per_call_are_those_of_the_profile(bench, tree, sampling):
    prompts = bench.random_prompts(BATCH, CONTEXT)
    bench.cache(prompts)
    deltas, _ = answer(bench, prompts, tree, 120, **sampling)
    whole = [delta for delta in deltas if delta.finish_reason is None]  # the last of each may be cut
    found = sum(len(delta.token_ids) for delta in whole) / len(whole)
    expected = bench.expected_tokens_per_call(tree)
    tolerance = 3 * (expected / len(whole)) ** 0.5
    assert found == pytest.approx(expected, abs=tolerance)
    assert tolerance < 0.25


def test_the_checksum_is_that_of_what_verification_really_found():
    sums = []
    for seed in (0, 0, 1):
        bench = make_bench()
        prompts = bench.random_prompts(2, CONTEXT)
        bench.cache(prompts)
        answer(bench, prompts, "chain-3", 20, temperature=1.0, seed=seed)
        sums.append(bench.checksum())
    assert sums[0] == sums[1]
    assert sums[2] != sums[0]


def test_prompts_are_all_different(bench):
    prompts = bench.random_prompts(BATCH, CONTEXT)
    assert len({prompt[:8] for prompt in prompts}) == BATCH
    assert {len(prompt) for prompt in prompts} == {CONTEXT + 1}


def test_contexts_that_do_not_fit_are_refused_and_the_engine_goes_on(bench):
    with pytest.raises(ConfigError, match="block size, 8"):
        bench.cache(bench.random_prompts(1, CONTEXT + 1))
    with pytest.raises(CapacityError, match="121 blocks, 120"):
        bench.cache(bench.random_prompts(121, 8))
    test_nothing_but_the_last_cached_token_is_prefilled(bench, "chain-3")


def test_the_work_of_a_step_counts_weights_once_and_contexts_of_every_row(bench):
    products, attention = bench.work("off", 4, 100)
    h, q, kv = 32, 64, 32
    matrices = 3 * (h * (q + 2 * kv) + q * h + 3 * h * 48) + 320 * h + 3 * 2 * h + h
    assert (products.num_bytes, products.num_flops) == (4 * matrices, 2 * matrices * 4)
    assert (attention.num_bytes, attention.num_flops) == (400 * 2 * 3 * kv * 4, 4 * 400 * q * 3)
    chain = {part.name: part for part in bench.work("chain-3", 4, 100)}
    assert len(chain) == 8
    assert chain["target products"].num_bytes == products.num_bytes
    assert chain["target products"].num_flops == 4 * products.num_flops
    assert chain["draft 0 products"].num_flops == 4 * chain["draft 1 products"].num_flops
    assert chain["draft 2 attention"].num_bytes == 400 * 2 * kv * 4


def test_predicted_memory_is_weights_pages_and_a_workspace():
    model = shape_of("llama-3.1-8b")
    small = predict_bytes(model, engine_config(block_size=64, num_blocks=1), num_blocks=1, num_nodes=1)
    large = predict_bytes(model, engine_config(block_size=64, num_blocks=9), num_blocks=9, num_nodes=1)
    assert large - small == 8 * 64 * (131072 + 4096)
    assert 17e9 < small < 21e9
    assert predict_bytes(shape_of("llama-3.3-70b"), engine_config(), 1, 1) > 140e9
