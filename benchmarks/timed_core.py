"""An engine core whose networks take a given time and no processor, for measuring everything around them.

Only the runner is replaced, where `Engine.load` asks for one: messages, scheduler, cache bookkeeping and
counters are the engine's own. What is measured on it is left to `serve_overhead`.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from app.bench_prompts import PASSAGE
from app.tokenizer import Tokenizer
from engine import EngineConfig, EngineFacts, ModelConfig, TreeLibrary, TreeTopology
from engine import engine as engine_module
from engine.batch import RowResult, StepPlan, StepResult
from engine.grammar.backend import no_backend
from engine.runner.guides import Guides
from engine.runner.runner import ModelRunner
from engine.runner.worker import Worker

NUM_BLOCKS = 4096
StepTimes = Sequence[tuple[int, float]]  # (most rows, seconds of a step) in rising order


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A launched step; `end` is when the device is through with it."""

    result: StepResult
    end: float

    def collect(self) -> StepResult:
        if (rest := self.end - time.perf_counter()) > 0:
            time.sleep(rest)
        return self.result


class NoDraft:
    """The draft of a runner without one."""

    failure = ""


class NoPrefill:
    """The prefills of a runner that captures nothing."""

    def capture(self, max_tokens: int) -> None:
        """Prepare nothing."""


class TimedRunner:
    """Runs one step after the other, each for the time of its number of rows; every row says `text` again and
    again.
    """

    is_captured = False

    def __init__(self, text: Sequence[int], times: StepTimes, vocab_size: int) -> None:
        self.guides = Guides(no_backend, vocab_size, torch.device("cpu"))
        self.draft_site, self.prefill = NoDraft(), NoPrefill()
        self._answers = [RowResult((token_id,)) for token_id in text]
        self._times = times
        self._num_said: dict[int, int] = {}  # by slot
        self._free_at = 0.0

    def capture(self, topology: TreeTopology, num_rows: range) -> None:
        """Prepare nothing: no step is captured."""

    def launch(self, plan: StepPlan) -> TimedStep:
        for admission in plan.admissions:
            self._num_said[admission.slot] = len(admission.tokens) - admission.num_prompt
        rows = tuple(self._say(row.slot) for row in plan.rows)
        seconds = self._seconds(max(len(plan.rows), len(plan.chunks)))
        self._free_at = max(time.perf_counter(), self._free_at) + seconds
        return TimedStep(StepResult(plan.step_idx, rows, seconds), self._free_at)

    def _say(self, slot: int) -> RowResult:
        num_said = self._num_said[slot]
        self._num_said[slot] = num_said + 1
        return self._answers[num_said % len(self._answers)]

    def _seconds(self, num_rows: int) -> float:
        return next((seconds for most, seconds in self._times if num_rows <= most), self._times[-1][1])


def build_timed(config: EngineConfig, times: StepTimes) -> Worker:
    """Do what `build_worker` does, without weights."""
    model = ModelConfig.load(config.model)
    text = Tokenizer(config.model).encode(PASSAGE, add_special_tokens=False)
    facts = EngineFacts(
        model_name=config.model.name,
        model_folder=str(config.model),
        model_digest="no weights",
        draft_digest=None,
        dtype="float32",
        device="cpu",
        attention_backend="none",
        num_threads=1,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        max_model_len=model.max_position,
        max_num_seqs=config.max_num_seqs,
        max_batched_tokens=config.device_sizes(is_cuda=False).max_batched_tokens,
        block_size=16,
        num_blocks=NUM_BLOCKS,
        trees=("off",),
    )
    runner = cast("ModelRunner", TimedRunner(text, times, model.vocab_size))
    return Worker(runner, TreeLibrary((), max_depth=0), facts)


def install(times: StepTimes) -> None:
    """Let engines of this process run on a `TimedRunner`."""
    build: Callable[[EngineConfig], Worker] = lambda config: build_timed(config, times)  # noqa: E731
    engine_module.build_worker = build


def write_site(folder: Path, times: StepTimes) -> None:
    """Write the module that Python imports at its start where `folder` is on its path; in a core it installs
    the timed runner, elsewhere nothing.
    """
    lines = (
        "import sys",
        'if sys.orig_argv[1:3] == ["-m", "engine.core"]:',
        f"    sys.path.insert(0, {json.dumps(str(Path(__file__).parents[1]))})",
        "    from benchmarks.timed_core import install",
        f"    install({json.dumps([list(pair) for pair in times])})",
    )
    (folder / "sitecustomize.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
