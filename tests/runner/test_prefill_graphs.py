"""Replayed prefills emit and leave what uncaptured ones do. Real graphs are left to `tests/gpu`."""

import pytest
import torch

from engine.batch import PrefillChunk
from engine.runner.packed_chunks import PrefillShape
from engine.runner.prefill_graphs import captured_shapes
from tests.exactness.head import build_drafter
from tests.exactness.tiny import EngineShape, build_target
from tests.runner.prefill_cases import SCENARIOS, DeviceReference, check_scenario, replaying_engine

TARGET = build_target()


@pytest.mark.parametrize("name", SCENARIOS)
def test_replays_change_no_token_and_no_cache(name):
    check_scenario(name, TARGET, DeviceReference())


@pytest.mark.parametrize(
    ("max_tokens", "max_chunks", "expected"),
    [
        (16, 1, [(16, 9)]),
        (17, 8, [(32, 9), (16, 9)]),
        (100, 9, [(128, 65), (128, 9), (64, 65), (64, 9), (32, 9), (16, 9)]),
        (1025, 64, [(1536, 65), *captured_shapes(1024, 64)]),
    ],
)
def test_shapes_reach_the_most_that_a_step_holds(max_tokens, max_chunks, expected):
    assert list(captured_shapes(max_tokens, max_chunks)) == expected


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 255, 256, 257, 700, 1024, 8192])
@pytest.mark.parametrize("num_chunks", [1, 8, 9, 64])
def test_a_shape_holds_every_small_prefill_and_a_chunk_of_padding(num_tokens, num_chunks):
    fitting = [
        shape
        for shape in captured_shapes(8192, 256)
        if shape.num_tokens >= num_tokens and shape.num_chunks > num_chunks
    ]
    smallest = min(fitting)
    assert smallest.num_tokens <= max(64, 2 * num_tokens)
    assert len(captured_shapes(8192, 256)) == 22


def make_prefill(max_batched_tokens=64):
    shape = EngineShape(max_num_seqs=7, max_batched_tokens=max_batched_tokens)
    backend = DeviceReference()
    engine = replaying_engine(shape, TARGET, build_drafter(shape, TARGET, backend), backend)
    return engine._runner.prefill


def chunk_of(size, slot=1):
    return PrefillChunk(slot, 0, tuple(range(6, 6 + size)), 7, 0)


def run_chunks(prefill, *chunks):
    with torch.inference_mode():
        return prefill.run(chunks)


def test_the_smallest_shape_that_fits_is_replayed_and_larger_ones_run_uncaptured():
    prefill = make_prefill()
    assert prefill._recorder.num_graphs == 6
    assert prefill._find(PrefillShape(17, 2)).packed.shape == (32, 9)
    assert run_chunks(prefill, chunk_of(20), chunk_of(11, slot=2)).hidden.shape[0] == 31
    assert prefill.num_replays == 1
    with pytest.raises(AssertionError, match="1 chunks ran uncaptured"):
        run_chunks(prefill, chunk_of(65))
    assert prefill.num_replays == 1


def test_a_forgotten_draft_is_recorded_anew_where_it_is_needed():
    prefill = make_prefill()
    prefill.forget_drafts()
    for _ in range(2):
        run_chunks(prefill, chunk_of(5))
    assert prefill._recorder.num_graphs == 7
    prefill.capture(64)
    assert prefill._recorder.num_graphs == 7, "nothing is captured twice"


def test_what_memory_is_short_for_is_told_and_runs_uncaptured(caplog):
    prefill = make_prefill(max_batched_tokens=16)
    record = prefill._recorder.record
    sizes = []

    def record_small(do):
        sizes.append(len(sizes))
        if len(sizes) == 1:
            raise torch.OutOfMemoryError("short")
        return record(do)

    prefill._recorder.record = record_small
    prefill.capture(64)
    assert "prefill not captured tokens=64 chunks=8 reason=short" in caplog.text
    assert set(prefill._sets) == {(32, 9), (16, 9)}
