"""Runs cells on a model of a published shape with random weights, whatever fits the memory of this machine.

What a cell measures is left to `bench_cells`. It needs torch and nothing else.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from app.bench_cells import LONG, ArmResult, Cell, Effort, measure_cell
from app.offline import frozen_heap
from engine import (
    CapacityError,
    EngineConfig,
    EngineFacts,
    MachineRates,
    ModelConfig,
    Profile,
    SyntheticEngine,
    SyntheticWeights,
    predict_bytes,
)

_GIB = 1 << 30
_SPARE_SHARE = 1.03  # of the blocks that the rows need: admission leaves a hundredth free
_DEVICE_SHARE = 0.985  # of the free memory that may be planned for


@dataclass(frozen=True, slots=True)
class SyntheticPlan:
    """What is measured on which model. `sizes` says device, dtype, block size and attention backend.

    `profile` is scaled already; the trees searched for it are of `tree_sizes`, (nodes, most levels). The
    cells share `seconds`; each gets at most `rounds` rounds, and with `is_traced` a trace of a few steps.
    """

    name: str
    model: ModelConfig
    sizes: EngineConfig
    profile: Profile
    tree_sizes: tuple[tuple[int, int], ...]
    cells: tuple[Cell, ...]
    rounds: int
    seconds: float
    is_traced: bool = False


@dataclass(frozen=True, slots=True)
class CellResult:
    """A measured cell, or a hole with its reason. `checksum` sums what verification really found."""

    cell: Cell
    arms: tuple[ArmResult, ...]
    checksum: int = 0
    hole: str | None = None


class SyntheticBench:
    """The machine's rates, the weights of one model, and an engine for as many cells as fit."""

    def __init__(self, plan: SyntheticPlan, clock: Callable[[], float] = time.perf_counter) -> None:
        self._plan, self._clock = plan, clock
        self._deadline = clock() + plan.seconds
        self._num_nodes = max([1, *(num_nodes for num_nodes, _ in plan.tree_sizes)])
        # Before the memory is taken: measuring needs some.
        self.rates = MachineRates.measure(plan.sizes)
        _free_memory()
        self._free_bytes = _free_bytes(plan.sizes)
        self._num_ahead = LONG + 2 * plan.sizes.speculation.feature_window
        # The weights are made once, for the longest context that is measured at all.
        contexts = [cell.context for cell in plan.cells if self._misfit(cell) is None]
        self._max_model_len = max(contexts, default=0) + self._num_ahead
        self._weights: SyntheticWeights | None = None
        self._engine: SyntheticEngine | None = None

    @property
    def facts(self) -> EngineFacts | None:
        """The facts of the engine that measured last, if any did."""
        return None if self._engine is None else self._engine.engine.facts

    def run(self) -> Iterator[CellResult]:
        """Yield the result of every cell in order: what does not fit, or comes too late, is a hole."""
        left = list(self._plan.cells)
        while left:
            cell, left = left[0], left[1:]
            reason = self._misfit(cell)
            if self._clock() > self._deadline:
                reason = "not begun: the time was up"
            if reason is None:
                try:
                    yield self._measure(cell, [c for c in left if self._misfit(c) is None], len(left))
                    continue
                except (torch.OutOfMemoryError, CapacityError) as error:
                    # Rows may be half way through a step: the next cell gets an engine of its own.
                    self._engine = None
                    reason = f"out of memory: {str(error).splitlines()[0]}"
            _free_memory()
            yield CellResult(cell, (), hole=reason)

    def _measure(self, cell: Cell, fitting: Sequence[Cell], num_left: int) -> CellResult:
        bench = self.open(cell, fitting)
        now = self._clock()
        deadline = now + max(0.0, self._deadline - now) / (num_left + 1)
        effort = Effort(self._plan.rounds, deadline, self._plan.is_traced)
        with frozen_heap():
            arms = measure_cell(bench, cell, self.rates, effort, self._clock)
        return CellResult(cell, tuple(arms), bench.checksum())

    def open(self, cell: Cell, fitting: Sequence[Cell]) -> SyntheticEngine:
        """Return the engine at hand where it holds the cell, else a new one: for the largest of `fitting` too
        where the memory lets it.
        """
        if self._engine is not None and self._holds(self._engine, cell):
            return self._engine
        self._engine = None
        _free_memory()
        with suppress(torch.OutOfMemoryError):
            self._engine = self._build((cell, *fitting))
        if self._engine is None:
            _free_memory()
            self._engine = self._build((cell,))
        return self._engine

    def _build(self, cells: Sequence[Cell]) -> SyntheticEngine:
        plan, config = self._plan, replace(self._sizes(cells), max_model_len=self._max_model_len)
        if self._weights is None:
            self._weights = SyntheticWeights.create(plan.name, plan.model, config)
        return SyntheticEngine(config, self._weights, plan.profile, plan.tree_sizes)

    def _holds(self, bench: SyntheticEngine, cell: Cell) -> bool:
        facts, config = bench.engine.facts, self._sizes((cell,))
        assert config.num_blocks is not None
        return facts.num_blocks >= config.num_blocks and facts.max_num_seqs >= config.max_num_seqs

    def _misfit(self, cell: Cell) -> str | None:
        """Return why a cell cannot run with this model on this machine, as far as sizes tell."""
        model = self._plan.model
        if cell.context + self._num_ahead > model.max_position:
            return f"beyond the {model.max_position} positions of the model"
        config = self._sizes((cell,))
        assert config.num_blocks is not None
        needed = predict_bytes(model, config, config.num_blocks, self._num_nodes)
        if needed <= self._free_bytes * _DEVICE_SHARE:
            return None
        return f"does not fit: {needed / _GIB:.1f} GiB predicted, {self._free_bytes / _GIB:.1f} free"

    def _sizes(self, cells: Sequence[Cell]) -> EngineConfig:
        """Return a config with the rows and blocks of any one of `cells`."""
        sizes = self._plan.sizes
        max_num_seqs = max(cell.batch for cell in cells)
        assert sizes.block_size is not None, "a plan states its block size"
        num_blocks = max(
            cell.batch * -(-(cell.context + self._num_ahead) // sizes.block_size) for cell in cells
        )
        return replace(
            sizes,
            num_blocks=int(num_blocks * _SPARE_SHARE) + 1,
            max_num_seqs=max_num_seqs,
            max_num_waiting=max_num_seqs,
            max_batched_tokens=max_num_seqs * (self._num_nodes + 1) + 1,
        )


def _free_bytes(sizes: EngineConfig) -> int:
    """Return the free memory of the device."""
    if sizes.device != "cpu" and torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
