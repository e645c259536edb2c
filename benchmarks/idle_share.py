"""Measures how long a GPU waits for the host between the decode steps of a real model.

No profiler runs: it would slow the host down. An event marks where a step ends on the device, and the host's
clock when the next one was enqueued as a whole; the device idles at most from the one to the other, and not
at all where the next step was enqueued before. Where the time of a step goes is left to `model_profile`.
Run: python benchmarks/idle_share.py MODEL_FOLDER PROMPTS.jsonl --draft FOLDER --out DIR 1:off 64:chain-3
64:auto
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

# Run by its path, Python looks for modules beside this file only.
sys.path.insert(0, str(Path(__file__).parents[1]))

from app.machine import describe_machine
from benchmarks.model_profile import open_model
from engine import Engine, Request, SamplingParams
from engine.batch import StepPlan
from engine.engine import assemble_engine
from engine.runner.runner import ModelRunner
from engine.runner.step_handle import StepHandle
from engine.runner.worker import build_worker
from engine.step_times import measure_latency

NUM_WARM_STEPS, NUM_STEPS, NUM_ROUNDS = 16, 96, 5
MAX_TOKENS = 640  # more than the steps of a round can emit over a chain of 3: no row ends


@dataclass(frozen=True, slots=True)
class IdleShare:
    """One cell: medians over rounds, and the least and the most of the idle share."""

    batch: int
    arm: str
    ms_per_step: float
    idle_share_at_most: float
    idle_range: tuple[float, float]
    share_of_steps_that_waited: float


class WatchedLaunch:
    """Stands in for a runner's `launch` and notes when each step was enqueued and where it ends."""

    def __init__(self, runner: ModelRunner) -> None:
        self._launch = runner.launch
        self._enqueued: list[float] = []
        self._ends: list[torch.cuda.Event] = []
        self._origin = _event()
        self._origin_time = 0.0
        self.begin()

    def __call__(self, plan: StepPlan) -> StepHandle:
        handle = self._launch(plan)
        self._enqueued.append(time.perf_counter())
        end = _event()
        end.record()
        self._ends.append(end)
        return handle

    def begin(self) -> None:
        """Forget what was seen, and lay the device's clock beside the host's."""
        self._enqueued, self._ends = [], []
        torch.cuda.synchronize()
        self._origin.record()
        self._origin.synchronize()
        self._origin_time = time.perf_counter()

    def idle(self) -> tuple[float, float, float]:
        """Return the seconds per step, the share of them in which the device may have idled, and the share of
        the steps before which it did.
        """
        torch.cuda.synchronize()
        ends = [self._origin_time + 1e-3 * self._origin.elapsed_time(end) for end in self._ends]
        waits = [max(0.0, begin - end) for end, begin in zip(ends, self._enqueued[1:], strict=False)]
        passed = ends[-1] - ends[0]
        return passed / len(waits), sum(waits) / passed, sum(wait > 0 for wait in waits) / len(waits)


def measure(
    engine: Engine, watch: WatchedLaunch, prompts: list[tuple[int, ...]], batch: int, arm: str
) -> IdleShare:
    """Return the cell of `batch` rows that all decode, over `arm`."""
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, speculation=arm)
    rounds = []
    for _ in range(NUM_ROUNDS):
        for row, prompt in enumerate(itertools.islice(itertools.cycle(prompts), batch)):
            engine.add(Request(f"row-{row}", prompt, sampling))
        for _ in range(NUM_WARM_STEPS):
            engine.step()
        watch.begin()
        for _ in range(NUM_STEPS):
            engine.step()
        assert engine.stats().num_running == batch, "a row ended within the round"
        rounds.append(watch.idle())
        for row in range(batch):
            engine.abort(f"row-{row}")
        while engine.has_work:
            engine.step()
    seconds, shares, waited = zip(*rounds, strict=True)
    return IdleShare(
        batch=batch,
        arm=arm,
        ms_per_step=1e3 * statistics.median(seconds),
        idle_share_at_most=statistics.median(shares),
        idle_range=(min(shares), max(shares)),
        share_of_steps_that_waited=statistics.median(waited),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("cells", nargs="+", help="BATCH:TREE, or BATCH:auto for the adaptive dispatcher")
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="a folder for the results as JSON")
    options = parser.parse_args()
    cells = [(int(batch), arm) for batch, _, arm in (cell.partition(":") for cell in options.cells)]
    mode = "auto" if any(arm == "auto" for _, arm in cells) else "off"
    model, prompts = open_model(options.model, options.draft, options.prompts, cells, mode)
    worker = build_worker(model.config)
    watch = WatchedLaunch(worker.runner)
    engine = assemble_engine(model.config, worker, latency=measure_latency(model.config, worker))
    engine.prepare()
    worker.runner.launch = watch  # type: ignore[method-assign]
    found = []
    for batch, arm in cells:
        if arm != "auto":
            engine.capture(arm, batch)
        found.append(measure(engine, watch, prompts, batch, arm))
        print(
            f"{batch:3} rows, {arm}: {found[-1].ms_per_step:.3f} ms a step, idle at most "
            f"{found[-1].idle_share_at_most:.1%}, before {found[-1].share_of_steps_that_waited:.0%} of steps",
            flush=True,
        )
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        result = {
            "environment": describe_machine(engine.facts),
            "steps": NUM_STEPS,
            "cells": [asdict(cell) for cell in found],
        }
        (options.out / "idle_share.json").write_text(json.dumps(result, indent=1) + "\n")


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
