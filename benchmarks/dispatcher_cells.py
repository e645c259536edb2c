"""Is the adaptive dispatcher as fast as the best fixed tree, cell by cell, on this machine?

A cell is a batch and an acceptance: the draft as it is, or with half or all of its tokens replaced by wrong
ones. In every round all modes answer the same prompts, in an order that alternates; the dispatcher that
learns keeps what it learnt from round to round and cell to cell, and sees its own steps only. Run:
python -m benchmarks.dispatcher_cells [--batch 1,4,8] [--rounds N] [--tokens N] > OUT.json
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from app.bench_prompts import QUESTIONS
from app.call import Message
from app.local_model import LocalModel
from app.machine import describe_machine
from app.offline import run_to_end
from engine import Engine, EngineConfig, MeasuredProfile, Request, SamplingParams
from engine.config import DTypeName
from engine.dispatcher.arms import select_arms
from engine.dispatcher.calibration import CalibrationPlan, calibrate
from engine.dispatcher.latency import LatencyTable
from engine.draft.drafter import DraftNoise, PromptPairs, TreeDrafter
from engine.draft.ops import AlignWindow
from engine.engine import assemble_engine
from engine.runner.worker import Worker, build_worker
from engine.speculation import DraftOutput, TreeTensors
from engine.step_times import StepTimes

AUTO = "auto"
SHARES = {"measured": 0.0, "half": 0.5, "zero": 1.0}  # of drafted tokens that are made wrong
CHAINS = ("chain-1", "chain-2", "chain-3", "chain-5")
LIMIT, MAX_ERROR = 0.98, 0.003


class WorseDrafter:
    """A drafter whose tokens are replaced by their neighbours at a share of positions and tokens, the same
    ones whatever the tree.
    """

    def __init__(self, drafter: TreeDrafter) -> None:
        self._drafter = drafter
        self.share = 0.0

    def fill(self, pairs: PromptPairs) -> None:
        self._drafter.fill(pairs)

    def draft(self, window: AlignWindow, tree: TreeTensors, noise: DraftNoise, draft: DraftOutput) -> None:
        self._drafter.draft(window, tree, noise, draft)
        positions = window.positions[:, -1:] + tree.depths
        draft.token_ids[:, 1:] = self._spoil(draft.token_ids, positions)[:, 1:]
        if draft.children is not None:
            draft.children.copy_(self._spoil(draft.children, positions[:, :, None] + 1))

    def _spoil(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        is_spoilt = (token_ids * 7919 + positions * 104729) % 1000 < 1000 * self.share
        return torch.where(is_spoilt & (token_ids >= 0), (token_ids - 1).clamp(min=0), token_ids)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=lambda text: tuple(map(int, text.split(","))), default=(1, 4, 8))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96, help="tokens per answer")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    options = parser.parse_args()
    model, worker, drafter = _load(options.dtype, max(options.batch))
    assert model.config.draft is not None
    profile = MeasuredProfile.load(model.config.draft / "manifest.json").probabilities
    table = _calibrate(model, worker, options.batch)
    print(table.to_json(), file=sys.stderr)
    trees = select_arms([worker.library.get(name) for name in table.names], profile, table)
    fixed = assemble_engine(model.config, worker.runner, worker.library, worker.facts)
    adaptive = assemble_engine(
        model.config, worker.runner, worker.library, worker.facts, latency=table, profile=profile
    )
    prompts = [model.encode_chat([Message("user", question)]) for question in QUESTIONS]
    cells = []
    for name, share in SHARES.items():
        drafter.share = share
        for batch in options.batch:
            modes = [AUTO, *(tree.name for tree in trees)]
            rates = _measure(adaptive, fixed, modes, prompts, batch, options)
            cells.append(_cell(name, batch, rates))
            print(cells[-1], file=sys.stderr, flush=True)
    report = {"environment": describe_machine(worker.facts), "table": json.loads(table.to_json())}
    print(
        json.dumps({**report, "rounds": options.rounds, "tokens": options.tokens, "cells": cells}, indent=1)
    )
    return 0 if all(cell["is_within"] for cell in cells) else 1


def _load(dtype: DTypeName, batch: int) -> tuple[LocalModel, Worker, WorseDrafter]:
    """Return the shipped model and draft, whose drafts can be spoilt. Nothing is shared between rounds."""
    sizes = EngineConfig(Path(), dtype=dtype, max_num_seqs=batch, enable_prefix_cache=False)
    model = LocalModel.open(sizes, "smollm2", "auto")
    worker = build_worker(model.config)
    runner = worker.runner
    assert runner._drafter is not None  # noqa: SLF001 - a benchmark's own seam
    drafter = WorseDrafter(runner._drafter)  # noqa: SLF001
    runner._drafter = runner._step._drafter = drafter  # noqa: SLF001
    return model, worker, drafter


def _calibrate(model: LocalModel, worker: Worker, batches: tuple[int, ...]) -> LatencyTable:
    engine = assemble_engine(model.config, worker.runner, worker.library, worker.facts)
    times = StepTimes(engine)
    names = dict.fromkeys((*worker.library.names, *CHAINS))
    trees = [worker.library.get(name) for name in names]
    plan = CalibrationPlan(batches=batches, contexts=(64, 512), max_seconds=600.0)
    window = model.config.speculation.feature_window
    catch_up = worker.library.get("chain-1")
    return calibrate(trees, plan, times.time_step, lambda batch: times.time_catch_up(batch, catch_up, window))


def _measure(
    adaptive: Engine,
    fixed: Engine,
    modes: list[str],
    prompts: list[tuple[int, ...]],
    batch: int,
    options: argparse.Namespace,
) -> dict[str, list[float]]:
    """Return tokens per second of every mode in every round; the first round warms up and is left out."""
    rates: dict[str, list[float]] = {mode: [] for mode in modes}
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
    for round_idx in range(options.rounds + 1):
        chosen = [prompts[(round_idx * batch + row) % len(prompts)] for row in range(batch)]
        requests = [Request(f"row-{row}", prompt, params) for row, prompt in enumerate(chosen)]
        for mode in modes if round_idx % 2 else reversed(modes):
            engine = adaptive if mode == AUTO else fixed
            engine.switch_speculation(mode)
            start = time.perf_counter()
            completions = run_to_end(engine, requests)
            seconds = time.perf_counter() - start
            rates[mode].append(sum(len(completion.token_ids) for completion in completions) / seconds)
    return {mode: found[1:] for mode, found in rates.items()}


def _cell(acceptance: str, batch: int, rates: dict[str, list[float]]) -> dict[str, object]:
    """Hold the adaptive mode against the fixed one that was best over all rounds."""
    means = {mode: statistics.fmean(found) for mode, found in rates.items()}
    best = max((mode for mode in means if mode != AUTO), key=means.__getitem__)
    ratios = [auto / other for auto, other in zip(rates[AUTO], rates[best], strict=True)]
    ratio, error = statistics.fmean(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5
    return {
        "acceptance": acceptance,
        "batch": batch,
        "best_fixed": best,
        "ratio": ratio,
        "standard_error": error,
        "tokens_per_second": means,
        "is_within": ratio >= LIMIT and error <= MAX_ERROR,
    }


if __name__ == "__main__":
    sys.exit(main())
