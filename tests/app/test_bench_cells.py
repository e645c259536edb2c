"""Cells on a tiny synthetic model: what fits is measured, what does not is a hole, numbers follow."""

import argparse
import dataclasses
import io
import itertools
import json
import xml.etree.ElementTree as ET

import pytest
import torch

from app import bench_cells, bench_synthetic, cli_bench_synthetic
from app.bench_cells import LONG, Cell, Effort, limit_seconds, measure_cell
from app.bench_synthetic import SyntheticBench, SyntheticPlan
from app.cli_bench_synthetic import parse_cells, run_plan
from engine import (
    ConfigError,
    MachineRates,
    StepError,
    SyntheticEngine,
    SyntheticWeights,
    WorkPart,
    chain,
    scale_profile,
)
from engine.tree.library import DEFAULT_PROFILE
from tests.synthetic_cases import TINY, engine_config

ARMS = ("off", "chain-3")
PROFILE = scale_profile(DEFAULT_PROFILE, chain(3), 2.78)
RATES = MachineRates(1e9, 1e12)


def make_plan(cells: tuple[Cell, ...], **changes) -> SyntheticPlan:
    fields = {
        "name": "tiny",
        "model": TINY,
        "sizes": engine_config(),
        "profile": PROFILE,
        "tree_sizes": ((8, 4),),
        "cells": cells,
        "rounds": 1,
        "seconds": 1e9,
    }
    return SyntheticPlan(**(fields | changes))


def cell(context: int = 16, batch: int = 2, arms: tuple[str, ...] = ARMS) -> Cell:
    return Cell(context, batch, 0.0, 1.0, arms)


class Ticks:
    """A clock that moves by one second whenever it is read."""

    def __init__(self) -> None:
        self._count = itertools.count()

    def __call__(self) -> float:
        return float(next(self._count))


@pytest.fixture(scope="module")
def engine():
    config = engine_config(max_model_len=512)
    return SyntheticEngine(config, SyntheticWeights.create("tiny", TINY, config), PROFILE, ((8, 4),))


@pytest.fixture(autouse=True)
def rates(monkeypatch):
    """Measuring the machine takes a second, and says nothing here."""
    monkeypatch.setattr(bench_synthetic.MachineRates, "measure", lambda config: RATES)
    monkeypatch.setattr(bench_synthetic, "_free_bytes", lambda sizes: 64 << 30)


@pytest.fixture
def short(monkeypatch):
    """Answers of 33 tokens, where the number does not matter."""
    monkeypatch.setattr(bench_cells, "LONG", 33)
    monkeypatch.setattr(bench_cells, "HOST_TOKENS", 9)


def test_an_arm_s_time_is_that_of_192_tokens(engine):
    """Each step reads the clock once: plain decoding takes a tick a token, a chain a tick a call."""
    plain, drafted = measure_cell(engine, cell(), RATES, Effort(1, 1e9), Ticks())
    assert (plain.arm, plain.rounds, plain.tokens_per_call) == ("off", 1, 1.0)
    assert plain.ms_per_token == 1000.0
    assert plain.ms_per_step == drafted.ms_per_step == plain.ms_host == 1000.0
    assert plain.speedup is None
    assert 2.3 < drafted.tokens_per_call < 3.3
    # The slower of the two rows decides.
    assert 1.0 < 1000.0 / drafted.ms_per_token <= drafted.tokens_per_call + 0.05
    assert drafted.speedup == (pytest.approx(1000.0 / drafted.ms_per_token),) * 3
    assert drafted.seconds_per_round == (drafted.ms_per_token / 1000,)
    assert drafted.ms_limit == 1000 * limit_seconds(engine.work("chain-3", 2, 16), RATES)
    assert drafted.roofline_share == drafted.ms_limit / 1000


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("deadline", "expected"), [(1e9, 4), (0.0, 3)])
def test_after_the_deadline_no_round_begins_but_the_first_three(engine, deadline, expected):
    results = measure_cell(engine, cell(batch=1), RATES, Effort(4, deadline), Ticks())
    assert [result.rounds for result in results] == [expected, expected]
    assert len(set(results[1].seconds_per_round)) > 1  # every round draws other paths


@pytest.mark.usefixtures("short")
def test_arms_alternate_and_draw_alike(engine, monkeypatch):
    added = []
    add = engine.engine.add
    monkeypatch.setattr(
        engine.engine,
        "add",
        lambda request: (added.append((request.sampling.speculation, request.sampling.seed)), add(request)),
    )
    arms = ("off", "chain-1", "tree-8")
    measure_cell(engine, cell(batch=1, arms=arms), RATES, Effort(2, 1e9), Ticks())
    timed = added[3:-3]  # without warm-up and the host's times
    assert [arm for arm, _ in timed[::2]] == [*arms, *reversed(arms)]
    assert [seed for _, seed in timed] == [timed[0][1]] * 6 + [timed[6][1]] * 6
    assert timed[0][1] != timed[6][1]


def test_a_context_that_is_not_cached_stops_the_measurement(engine, monkeypatch):
    monkeypatch.setattr(engine, "cache", lambda prompts: None)
    with pytest.raises(StepError, match="not found in the cache"):
        measure_cell(engine, cell(context=24), RATES, Effort(1, 1e9), Ticks())


def test_the_limit_takes_the_slower_of_moving_and_multiplying_in_each_part():
    parts = [WorkPart("a", 2 * 10**9, 10**12), WorkPart("b", 10**9, 5 * 10**12)]
    assert limit_seconds(parts, RATES) == 2 + 5


@pytest.mark.usefixtures("short")
def test_a_cell_that_does_not_fit_is_a_hole_and_the_others_run(monkeypatch):
    monkeypatch.setattr(bench_synthetic, "_free_bytes", lambda sizes: 5 << 29)
    cells = (cell(), cell(context=1 << 16, batch=64), cell(batch=1))
    first, hole, last = SyntheticBench(make_plan(cells)).run()
    assert hole.arms == ()
    assert "does not fit" in hole.hole
    assert [len(result.arms) for result in (first, last)] == [2, 2]
    assert first.checksum > 0


@pytest.mark.usefixtures("short")
def test_running_out_of_memory_is_a_hole_and_the_next_cell_runs(monkeypatch):
    original, seen = bench_synthetic.measure_cell, []

    def measure(bench, measured, *rest):
        seen.append(bench)
        if measured.batch == 4:
            raise torch.OutOfMemoryError("tried to allocate\nmuch")
        return original(bench, measured, *rest)

    monkeypatch.setattr(bench_synthetic, "measure_cell", measure)
    _, hole, last = SyntheticBench(make_plan((cell(), cell(batch=4), cell(batch=1)))).run()
    assert hole.hole == "out of memory: tried to allocate"
    assert len(last.arms) == 2
    assert seen[0] is seen[1] is not seen[2]


@pytest.mark.usefixtures("short")
def test_an_engine_too_large_for_all_is_built_for_one(monkeypatch):
    original, sizes = bench_synthetic.SyntheticEngine, []

    def build(config, *rest):
        sizes.append(config.max_num_seqs)
        if config.max_num_seqs == 4:
            raise torch.OutOfMemoryError("no")
        return original(config, *rest)

    monkeypatch.setattr(bench_synthetic, "SyntheticEngine", build)
    first, hole, last = SyntheticBench(make_plan((cell(), cell(batch=4), cell(batch=1)))).run()
    assert (first.hole, hole.hole, last.hole) == (None, "out of memory: no", None)
    assert sizes == [4, 2, 4, 4, 1]


@pytest.mark.usefixtures("short")
def test_cells_after_the_time_are_holes():
    first, second = SyntheticBench(make_plan((cell(), cell()), seconds=3.0), Ticks()).run()
    assert first.hole is None
    assert second.hole == "not begun: the time was up"


@pytest.mark.usefixtures("short")
def test_the_report_is_written_after_every_cell(tmp_path, monkeypatch):
    lengths = []
    original = cli_bench_synthetic.json_report
    monkeypatch.setattr(
        cli_bench_synthetic,
        "json_report",
        lambda *args: (lengths.append(len(args[-1])), original(*args))[1],
    )
    plan = make_plan((cell(), cell(batch=4), cell(context=1 << 17)))
    out = io.StringIO()
    run_plan(plan, "from a test", out, tmp_path / "new")
    assert lengths == [1, 2, 3]
    text = out.getvalue()
    assert "synthetic weights, replayed acceptance" in text
    assert "hole: beyond the 131072 positions" in text
    assert text.count("chain-3") == 2
    report = json.loads((tmp_path / "new" / "cells.json").read_text())
    assert report["label"] == "synthetic weights, replayed acceptance"
    assert report["environment"]["device"] == "cpu"
    assert report["profile_source"] == "from a test"
    measured = report["cells"][0]
    assert (measured["context"], measured["batch"]) == (16, 2)
    assert [arm["arm"] for arm in measured["arms"]] == list(ARMS)
    assert f"checksum of the real verifications: {sum(c['checksum'] for c in report['cells'][:2])}" in text
    assert "hole" in report["cells"][2]
    root = ET.parse(tmp_path / "new" / "speedup.svg").getroot()
    assert len(root.findall(".//{http://www.w3.org/2000/svg}polyline")) == 1


def test_a_profile_s_plan_gives_the_length_asked_for(monkeypatch):
    monkeypatch.setattr(cli_bench_synthetic, "shape_of", lambda name: TINY)
    options = argparse.Namespace(
        synthetic="tiny",
        profile=None,
        tokens_per_call=2.5,
        trees=((8, 4),),
        device="cpu",
        dtype="float32",
        block_size=8,
        attention_backend="auto",
        rounds=1,
        seconds=1.0,
        trace=True,
    )
    plan, source = cli_bench_synthetic.plan_of(options, (cell(),))
    first, second, third = (row[0] for row in plan.profile[:3])
    assert 1 + first * (1 + second * (1 + third)) == pytest.approx(2.5)
    assert plan.is_traced
    assert "held-out prompts" in source
    assert "2.5 tokens per call with chain-3" in source


def test_cells_are_read_as_context_and_batch():
    found = parse_cells("1k:64,512:1", ARMS, (0.0, 0.8))
    assert [(c.context, c.batch, c.temperature, c.top_p) for c in found] == [
        (1024, 64, 0.0, 1.0),
        (1024, 64, 0.8, 0.9),
        (512, 1, 0.0, 1.0),
        (512, 1, 0.8, 0.9),
    ]
    assert LONG == 193


@pytest.mark.parametrize("text", ["", "1k", "1k:", "k:3", "1k:x", "1k:64,"])
def test_cells_that_cannot_be_read_are_refused(text):
    with pytest.raises(ConfigError, match="CONTEXT:BATCH"):
        parse_cells(text, ARMS, (0.0,))


def test_fields_of_a_cell_are_all_in_the_json_form():
    assert set(dataclasses.asdict(cell())) == {"context", "batch", "temperature", "top_p", "arms"}
