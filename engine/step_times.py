"""What decode steps cost on this machine, by tree, batch and context: timed on a runner at the start.

Which steps are worth timing is left to `dispatcher/calibration`; no scheduler takes part, and no prompt is
run.
"""

import functools
import logging
import math
import statistics
import time
from collections.abc import Sequence
from typing import Protocol

from engine.batch import Admission, BlockGrowth, DecodeRow, StepPlan
from engine.config import EngineConfig
from engine.dispatcher.calibration import CalibrationPlan, calibrate
from engine.dispatcher.latency import LatencyTable
from engine.request import SamplingParams
from engine.runner.graphs import CaptureMemoryError, row_bucket
from engine.runner.step_handle import StepHandle
from engine.runner.worker import Worker
from engine.stats import EngineFacts
from engine.tree.library import TreeLibrary
from engine.tree.topology import TreeTopology

logger = logging.getLogger(__name__)

CHAINS = (1, 2, 3, 5)  # drafts of the chains that may become arms, beside the trees of the draft
_CPU_SECONDS, _CUDA_SECONDS = 4.0, 90.0  # the most that timing takes, but for the step that is running then
_CPU_CONTEXTS, _CUDA_CONTEXTS = (64, 1024), (64, 4096)  # cached tokens of a row
_NUM_WARM_UP = 1  # steps: the first may compile


class TimedRunner(Protocol):
    """What timing asks of a runner."""

    @property
    def is_captured(self) -> bool: ...
    def capture(self, topology: TreeTopology, num_rows: range) -> None: ...
    def launch(self, plan: StepPlan) -> StepHandle: ...


class StepTimes:
    """Steps rows of made-up text on a runner that nobody else uses yet.

    Their contexts are whatever the pages hold and their drafts are hardly ever right: neither changes the
    time of a step. Whoever takes the slots next finds nothing of them.
    """

    def __init__(self, runner: TimedRunner, facts: EngineFacts, num_steps: int = 2) -> None:
        self._runner, self._facts, self._num_steps = runner, facts, num_steps

    def time_step(self, batch: int, tree: TreeTopology, context: int) -> float:
        """Return the seconds of a step of `batch` rows over `tree`, each behind about `context` cached
        tokens; infinity where so many do not fit.
        """
        try:
            self._runner.capture(tree, range(batch, batch + 1))
        except CaptureMemoryError as error:
            logger.warning("steps not timed: %s", error)
            return math.inf
        seconds = self._run([tree] * (_NUM_WARM_UP + self._num_steps), batch, context)
        return statistics.median_low(seconds[_NUM_WARM_UP:]) if seconds else math.inf

    def time_catch_up(
        self, plain: TreeTopology, tree: TreeTopology, num_plain: int, batch: int, context: int = 64
    ) -> float:
        """Return how many seconds more the first step over `tree` takes after `num_plain` steps of plain
        decoding than those after it; infinity where the batch does not fit.
        """
        try:
            for topology in (plain, tree):
                self._runner.capture(topology, range(batch, batch + 1))
        except CaptureMemoryError as error:
            logger.warning("catching up not timed: %s", error)
            return math.inf
        trees = [plain] * num_plain + [tree] * (1 + self._num_steps)
        seconds = self._run(trees, batch, context)[num_plain:]
        return max(0.0, seconds[0] - statistics.median_low(seconds[1:])) if seconds else math.inf

    def _run(self, trees: Sequence[TreeTopology], batch: int, context: int) -> list[float]:
        """Return the seconds of one step over each of `trees`, one after the other on the same rows; nothing
        where the rows do not fit.
        """
        facts = self._facts
        num_tokens = context + 1 + sum(tree.depth + 1 for tree in trees)
        num_blocks = -(-num_tokens // facts.block_size)
        if batch > facts.max_num_seqs or num_tokens > facts.max_model_len:
            return []
        if batch * num_blocks > facts.num_blocks:
            return []
        handles, max_len = [], context
        admissions, growths = _rows(batch, context, num_blocks)
        for idx, tree in enumerate(trees):
            rows = tuple(DecodeRow(slot, tree) for slot in range(1, batch + 1))
            handles.append(self._runner.launch(StepPlan(idx, admissions, growths, (), rows, max_len)))
            admissions, growths = (), ()  # the rows go on
            max_len += tree.depth + 1
        return [handle.collect().seconds for handle in handles]


def measure_latency(config: EngineConfig, worker: Worker) -> LatencyTable | None:
    """Return the latency table of the worker's runner, captured steps included where it captures any.

    None where nothing would be chosen by it: without a draft, and where the config names a tree or a table.
    """
    speculation, library = config.speculation, worker.library
    if speculation.mode != "auto" or speculation.table is not None or not library.max_depth:
        return None
    started = time.perf_counter()
    facts, runner = worker.facts, worker.runner
    times = StepTimes(runner, facts)
    catch_up = functools.partial(
        times.time_catch_up, library.get("off"), library.get("chain-1"), speculation.feature_window
    )
    trees = candidates(library)
    table = calibrate(
        trees,
        plan_timing(facts, is_captured=runner.is_captured),
        times.time_step,
        catch_up,
        lambda: time.perf_counter() - started,
        is_padded=runner.is_captured,
    )
    if table is None:
        logger.warning("steps not timed: the cache is too short for a row of %d positions", _CPU_CONTEXTS[0])
        return None
    logger.info(
        "steps timed seconds=%.1f batches=%s trees=%s",
        time.perf_counter() - started,
        ",".join(map(str, table.batches)),
        ",".join(table.names),
    )
    return table


def candidates(library: TreeLibrary) -> tuple[TreeTopology, ...]:
    """Return the trees that may become arms, plain decoding first, in rising number of nodes."""
    chains = [f"chain-{depth}" for depth in CHAINS if depth <= library.max_depth]
    trees = [library.get(name) for name in (*library.names, *chains)]
    return tuple(sorted(trees, key=lambda tree: (tree.num_nodes, tree.depth)))


def plan_timing(facts: EngineFacts, *, is_captured: bool) -> CalibrationPlan:
    """Return what to time: every number of rows that is captured, else doubling ones."""
    most = facts.max_num_seqs
    if is_captured:
        batches = {min(row_bucket(rows), most) for rows in range(1, most + 1)}
    else:
        batches = {1 << power for power in range(most.bit_length())} | {most}
    is_cuda = facts.device.startswith("cuda")
    contexts = _CUDA_CONTEXTS if is_cuda else _CPU_CONTEXTS
    return CalibrationPlan(
        batches=tuple(sorted(batches)),
        contexts=tuple(sorted({min(context, max(1, facts.max_model_len // 2)) for context in contexts})),
        num_repeats=1,
        max_seconds=_CUDA_SECONDS if is_cuda else _CPU_SECONDS,
    )


def _rows(batch: int, context: int, num_blocks: int) -> tuple[tuple[Admission, ...], tuple[BlockGrowth, ...]]:
    """Return what gives slots 1 to `batch` a text of `context` cached tokens and a root, and blocks."""
    tokens, params = (0,) * (context + 1), SamplingParams(temperature=0.0)
    slots = range(1, batch + 1)
    admissions = tuple(Admission(slot, tokens, len(tokens), params, seed=0, draft_start=0) for slot in slots)
    growths = tuple(
        BlockGrowth(slot, 0, tuple(range(1 + (slot - 1) * num_blocks, 1 + slot * num_blocks)))
        for slot in slots
    )
    return admissions, growths
