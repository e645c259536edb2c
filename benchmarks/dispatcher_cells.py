"""Is the adaptive dispatcher as fast as the best fixed tree, cell by cell, on this machine?

A cell is a context, a batch and an acceptance: the profile of a draft, or half or none of it. Networks have
the sizes of a published model and random weights (for SmolLM2 the draft is the shipped one), contexts are
random pages that no prompt filled, acceptance is replayed. A round is a fixed number of steps of the full
batch: in each, all modes start from the same prompts with the same seeds, in an order that alternates; trees
that are far from the best are left out after a few rounds, those that surely are not the best after some
more. Time is measured, and each call counts the tokens that its tree brings on average under the replayed
acceptance: so chance in what was accepted is not taken for speed. Ratios of rounds are averaged without the
highest and the lowest fifth, since a machine may stand still for a moment; the ratio over all rounds, with
what the dispatcher loses in few of them, stands beside. The dispatcher that learns has an engine of its own,
times its steps as at every start, and keeps what it learnt from cell to cell; it runs for a while at each
before it is measured. Acceptance only falls from cell to cell, since one that comes back is noticed by rare
probes after a time that the simulation judges (`simulate_dispatcher`), and rounds before and after it have no
common mean. Run, on a GPU:

python -m benchmarks.dispatcher_cells --model smollm2-135m --seconds 500 --out DIR
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from app.drafts import SHIPPED_DRAFTS
from app.machine import describe_machine
from app.offline import frozen_heap
from benchmarks.paired_rounds import (
    AUTO,
    Lengths,
    Rounds,
    best_fixed,
    rates_of,
    screened,
    trimmed_mean,
    whole_rate,
)
from benchmarks.ranked_replay import RankedReplay
from benchmarks.steady_steps import SteadySteps, most_tokens, time_steps
from engine import (
    EngineConfig,
    MeasuredProfile,
    Profile,
    Request,
    SamplingParams,
    SpeculationConfig,
    chain,
    scale_profile,
    shape_of,
)
from engine.dispatcher.arms import select_arms
from engine.dispatcher.latency import LatencyTable
from engine.draft.loader import LoadedDraft, load_draft
from engine.engine import assemble_engine
from engine.kvcache.block_pool import BlockPool
from engine.kvcache.kv_cache import KVCache
from engine.runner.calibrate import choose_device, choose_dtype
from engine.runner.rates import synchronize
from engine.runner.synthetic import eagle3_config, fill_pages, random_head, random_target
from engine.runner.worker import Origin, Worker, choose_verify, count_positions, wire_worker
from engine.step_times import measure_latency
from engine.synthetic import cache_contexts, predict_bytes
from engine.tree.library import TreeLibrary
from engine.tree.search import acceptance_length
from engine.tree.topology import MAX_NODES

PLAIN = "off"
SHARES = {"measured": 1.0, "half": 0.5, "zero": 0.0}  # of the profile's acceptance, falling
TOKENS_PER_CALL = 2.78  # of a chain of 3, for a model whose draft is made up
LIMIT, MAX_ERROR = 0.98, 0.003
_FEWEST_ROUNDS, _MIN_ROUNDS, _MAX_ROUNDS = 3, 16, 400  # to report, to stop early, to stop
_SETTLING_STEPS = 300  # of the adaptive engine at the full batch of a cell, before it is measured
_DEVICE_SHARE = 0.8  # of the free memory that a cell may be predicted to need
_MAX_DEPTH = SpeculationConfig().feature_window - 1
_GOLDEN, _MASK = 0x9E3779B97F4A7C15, (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Cell:
    context: int
    batch: int
    acceptance: str

    def __str__(self) -> str:
        return f"{self.context} x {self.batch} {self.acceptance}"


@dataclass(frozen=True, slots=True)
class Result:
    """Tokens per second of each mode and the adaptive one's share of the best fixed one, with its error.

    `whole_ratio` is that share over all rounds, none left out; `calls` says how often the adaptive one ran
    each tree in them, `arm` which it ran most.
    """

    cell: Cell
    best: str
    ratio: float
    standard_error: float
    whole_ratio: float
    num_rounds: int
    arm: str
    tokens_per_second: dict[str, float]
    calls: dict[str, int]

    @property
    def is_within(self) -> bool:
        return self.ratio >= LIMIT and self.standard_error <= MAX_ERROR


class Bench:
    """One model, its runner, and two engines on it that never run at once: one learns, one does as told."""

    def __init__(self, name: str, cells: Sequence[Cell], num_steps: int, block_size: int) -> None:
        self._num_steps = num_steps
        self._profile, library = _profile_of(name), _library(name)
        self._max_tokens = most_tokens(num_steps, _deepest(library))
        config = _config(name, cells, self._max_tokens, block_size)
        worker, self._replay = _build(name, self._profile, library, config)
        started = time.perf_counter()
        table = measure_latency(config, worker)
        assert table is not None, "the cells have a row at least"
        self.table: LatencyTable = table
        self.calibration_seconds = time.perf_counter() - started
        for seed, pool in enumerate(worker.runner.page_pools):
            fill_pages(pool, seed)
        self._kv_cache = KVCache(BlockPool(worker.facts.num_blocks + 1, block_size))
        self._adaptive = assemble_engine(config, worker, self._kv_cache, table)
        self._adaptive.prepare()
        self._fixed = assemble_engine(
            replace(config, speculation=SpeculationConfig(mode=PLAIN)), worker, self._kv_cache
        )
        self.facts, self._device = worker.facts, torch.device(worker.facts.device)
        self._known = [worker.library.get(tree) for tree in table.names]
        deepest = max(tree.depth for tree in self._known)
        assert deepest <= _deepest(library), f"rows may end within a round over {deepest} levels"
        self.trees = [tree.name for tree in select_arms(self._known, self._profile, table)]

    def measure(self, cell: Cell, deadline: float) -> Result | None:
        """Return the result of a cell; None where not a few rounds fit before `deadline`."""
        profile = [[p * SHARES[cell.acceptance] for p in row] for row in self._profile]
        self._replay.set_profile(profile)
        lengths = {tree.name: acceptance_length(tree, profile) for tree in self._known}
        prompts = _prompts(cell, self.facts.vocab_size)
        for idx in range(-(-_SETTLING_STEPS // self._num_steps)):
            self._run(prompts, AUTO, 1000 + idx)
        trees = [tree for tree in self.trees if self.table.seconds(tree, cell.batch, 0) < float("inf")]
        for tree in trees:
            self._fixed.capture(tree, cell.batch)
            self._run(prompts, tree, 0)
        rounds: Rounds = {mode: [] for mode in (AUTO, *trees)}
        for round_idx in range(1, _MAX_ROUNDS + 1):
            if time.perf_counter() > deadline:
                break
            for mode in list(rounds) if round_idx % 2 else list(rounds)[::-1]:
                rounds[mode].append(self._run(prompts, mode, round_idx))
            rounds = screened(rounds, lengths)
            error = _result(cell, rounds, lengths).standard_error
            if round_idx >= _MIN_ROUNDS and error <= 0.9 * MAX_ERROR:
                break
        if len(rounds[AUTO]) < _FEWEST_ROUNDS:
            return None
        return _result(cell, rounds, lengths)

    def _run(self, prompts: Sequence[tuple[int, ...]], mode: str, round_idx: int) -> SteadySteps:
        """Return what one round took and did."""
        cache_contexts(self._kv_cache, prompts)
        requests = [
            Request(
                f"row-{row}",
                prompt,
                SamplingParams(
                    temperature=0.0,
                    max_tokens=self._max_tokens,
                    ignore_eos=True,
                    seed=(round_idx * len(prompts) + row + 1) * _GOLDEN & _MASK,
                    speculation=mode,
                ),
            )
            for row, prompt in enumerate(prompts)
        ]
        engine = self._adaptive if mode == AUTO else self._fixed
        return time_steps(
            engine, requests, self._num_steps, lambda: synchronize(self._device), time.perf_counter
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="smollm2-135m or llama-3.1-8b")
    parser.add_argument("--context", type=_integers, default=(512, 7168), help="multiples of the block size")
    parser.add_argument("--batch", type=_integers, default=(1, 4, 16, 64))
    parser.add_argument("--steps", type=int, default=48, help="steps of a round")
    parser.add_argument("--cells", type=int, help="measure so many, drawn at random; all by default")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=500.0, help="of measuring, the start not counted")
    parser.add_argument("--out", type=Path, help="a folder for the results as JSON")
    options = parser.parse_args()
    cells = [Cell(*key) for key in _product(options.context, options.batch)]
    random.Random(0).shuffle(cells)  # noqa: S311 - which cells are measured is no secret
    left_out = cells[options.cells :] if options.cells else []
    cells = cells[: options.cells] if options.cells else cells
    while cells and not _fits(options, cells):
        widest = max(cells, key=lambda cell: (cell.batch * cell.context, str(cell)))
        cells.remove(widest)
        left_out.append(widest)
    cells.sort(key=lambda cell: list(SHARES).index(cell.acceptance))
    bench = Bench(options.model, cells, options.steps, options.block_size)
    print(f"steps timed in {bench.calibration_seconds:.1f} s; arms: {', '.join(bench.trees)}")
    print(
        f"{'context x batch acceptance':<28} {'best fixed':>10} {'arm':>8} {'ratio':>7} {'error':>7}"
        f" {'whole':>7}  rounds"
    )
    results: list[Result] = []
    deadline = time.perf_counter() + options.seconds
    for idx, cell in enumerate(cells):
        now = time.perf_counter()
        with frozen_heap():
            found = bench.measure(cell, now + (deadline - now) / (len(cells) - idx))
        if found is None:
            left_out.append(cell)
            continue
        results.append(found)
        print(
            f"{cell!s:<28} {found.best:>10} {found.arm:>8} {found.ratio:>7.4f} {found.standard_error:>7.4f}"
            f" {found.whole_ratio:>7.4f}"
            f"  {found.num_rounds:>6}{'' if found.is_within else '  OUTSIDE'}",
            flush=True,
        )
    num_within = sum(result.is_within for result in results)
    print(f"{num_within} of {len(results)} within; not measured: {', '.join(map(str, left_out)) or 'none'}")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        report = _report(options, bench, results, left_out)
        (options.out / f"dispatcher_cells_{options.model}.json").write_text(report, encoding="utf-8")
    return 0 if num_within == len(results) else 1


def _fits(options: argparse.Namespace, cells: Sequence[Cell]) -> bool:
    """Return whether the device has memory for one engine for all cells, its widest trees included."""
    if not torch.cuda.is_available():
        return True
    max_tokens = most_tokens(options.steps, _deepest(_library(options.model)))
    config = _config(options.model, cells, max_tokens, options.block_size)
    assert config.num_blocks is not None
    needed = predict_bytes(shape_of(options.model), config, config.num_blocks, MAX_NODES)
    return needed < _DEVICE_SHARE * torch.cuda.mem_get_info()[0]


def _build(
    name: str, profile: Profile, library: TreeLibrary, config: EngineConfig
) -> tuple[Worker, RankedReplay]:
    """Return a runner over random weights, and what sets its acceptance."""
    model = shape_of(name)
    device = choose_device(config)
    dtype, num_positions = choose_dtype(config, model, device), count_positions(config, model)
    shipped = _shipped_draft(name)
    taps = shipped.config.taps if shipped else eagle3_config(model).taps
    target = random_target(model, taps, num_positions, dtype, device)
    if shipped is not None:
        head = shipped.build(target.embed_tokens.weight, target.head_weight, num_positions, dtype, device)
    else:
        head = random_head(eagle3_config(model), target, num_positions)
    replay = RankedReplay(profile, device, choose_verify(device))
    origin = Origin(name, "", "synthetic weights", "synthetic weights")
    worker = wire_worker(config, target, head, library, origin, replay)
    return replace(worker, profile=profile), replay


def _shipped_draft(name: str) -> LoadedDraft | None:
    return load_draft(SHIPPED_DRAFTS / "smollm2") if name == "smollm2-135m" else None


def _library(name: str) -> TreeLibrary:
    shipped = _shipped_draft(name)
    if shipped is None:
        return TreeLibrary.search(_profile_of(name), _MAX_DEPTH)
    assert shipped.trees is not None, "the shipped draft has trees"
    return TreeLibrary.load(shipped.trees, _MAX_DEPTH)


def _deepest(library: TreeLibrary) -> int:
    """Return the levels of the deepest tree: chains that are timed have fewer."""
    return max(library.get(name).depth for name in library.names)


def _profile_of(name: str) -> Profile:
    measured = MeasuredProfile.load(SHIPPED_DRAFTS / "smollm2" / "manifest.json").probabilities
    return measured if name == "smollm2-135m" else scale_profile(measured, chain(3), TOKENS_PER_CALL)


def _config(name: str, cells: Sequence[Cell], max_tokens: int, block_size: int) -> EngineConfig:
    """Return an engine's sizes with room for the largest cell."""
    ahead = max_tokens + 64  # trees and what an asynchronous host reserves
    most = max(cell.batch for cell in cells)
    blocks = max(cell.batch * -(-(cell.context + ahead) // block_size) for cell in cells)
    return EngineConfig(
        Path(name),
        block_size=block_size,
        num_blocks=int(blocks * 1.03) + 2,
        max_model_len=max(cell.context for cell in cells) + ahead,
        max_num_seqs=most,
        max_num_waiting=most,
        max_batched_tokens=max(512, 65 * most + 1),
    )


def _prompts(cell: Cell, vocab_size: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(vocab_size, (cell.batch, cell.context + 1), generator=generator).tolist()
    return [tuple(row) for row in rows]


def _result(cell: Cell, rounds: Mapping[str, Sequence[SteadySteps]], lengths: Lengths) -> Result:
    """Hold the adaptive mode against the fixed one that was best over all rounds."""
    rates = rates_of(rounds, lengths)
    means = {mode: trimmed_mean(found)[0] for mode, found in rates.items()}
    best = best_fixed(rates)
    ratios = [auto / other for auto, other in zip(rates[AUTO], rates[best], strict=True)]
    ratio, error = trimmed_mean(ratios)
    whole_ratio = whole_rate(rounds[AUTO], lengths) / whole_rate(rounds[best], lengths)
    calls = sum((Counter(steps.calls) for steps in rounds[AUTO]), Counter[str]())
    (arm, _), *_ = calls.most_common()
    return Result(cell, best, ratio, error, whole_ratio, len(ratios), arm, means, dict(calls))


def _product(contexts: Sequence[int], batches: Sequence[int]) -> list[tuple[int, int, str]]:
    return [(context, batch, name) for context in contexts for batch in batches for name in SHARES]


def _report(
    options: argparse.Namespace, bench: Bench, results: Sequence[Result], left_out: Sequence[Cell]
) -> str:
    report = {
        "environment": describe_machine(bench.facts),
        "calibration_seconds": bench.calibration_seconds,
        "table": json.loads(bench.table.to_json()),
        "steps_per_round": options.steps,
        "settling_steps": _SETTLING_STEPS,
        "limit": LIMIT,
        "cells": [asdict(result) | {"is_within": result.is_within} for result in results],
        "not_measured": [str(cell) for cell in left_out],
    }
    return json.dumps(report, indent=1) + "\n"


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    sys.exit(main())
