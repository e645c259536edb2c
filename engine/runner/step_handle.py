"""A launched step on its way back to the host, and the time the device spent on it.

What the step computes is left to `runner`.
"""

import time

import torch

from engine.batch import StepPlan, StepResult
from engine.runner.guides import GuidedStep
from engine.runner.host_copy import read_answer, to_host
from engine.runner.logprobs import StepLogprobs
from engine.runner.step_output import DecodedRows, PrefilledChunks


class StepTimer:
    """Times one step of a device: by the host's clock on a CPU, by events of the stream on CUDA.

    A step that is launched before the one `before` it was waited for takes turns with it: on a CPU the one
    before lasts until this launch, on CUDA this one from the end of the one before. So the seconds of steps
    in a row add up to the time that passes, whatever else the host does in it.
    """

    def __init__(self, device: torch.device, before: "StepTimer | None" = None) -> None:
        self._started, self._stopped, self._is_over = time.perf_counter(), 0.0, False
        self._last = _event() if device.type == "cuda" else None
        self._first = None if before is None else before.next_began(self._started)
        if self._last is not None and self._first is None:
            self._first = _event()
            self._first.record()

    def next_began(self, started: float) -> torch.cuda.Event | None:
        """Learn when the next step was launched; return the event that ends this one where nobody waited for
        it yet.
        """
        if self._is_over:
            return None
        self._stopped = started
        return self._last

    def stop(self) -> None:
        """Mark the end of what was enqueued; on a CPU it is done by then."""
        self._stopped = time.perf_counter()
        if self._last is not None:
            self._last.record()

    def wait(self) -> float:
        """Wait for the end and return the seconds from the start to it."""
        self._is_over = True
        if self._first is None or self._last is None:
            return self._stopped - self._started
        self._last.synchronize()
        return float(self._first.elapsed_time(self._last)) * 1e-3


class StepHandle:
    """The answer of one step on its way: rows [B, 2 D + 5] int64 as `CommittedRows` has them, is_chunk_finite
    [C] bool of its chunks, and the log-probabilities that some of them ask for. `guide` has the rows that
    follow a grammar.
    """

    def __init__(
        self,
        plan: StepPlan,
        decoded: DecodedRows | None,
        prefilled: PrefilledChunks | None,
        logprobs: StepLogprobs,
        timer: StepTimer,
        guide: GuidedStep | None,
    ) -> None:
        self._step_idx = plan.step_idx
        nothing = torch.empty(0, dtype=torch.int64)
        self._rows = nothing if decoded is None else to_host(decoded.answer[: len(plan.rows)])
        self._is_chunk_finite = nothing if prefilled is None else to_host(prefilled.is_finite)
        self._logprobs = logprobs.moved(to_host)
        self._reasons: dict[int, str] = {}
        if guide is not None:
            guide.note(self._rows)
            self._reasons = guide.reasons()
        self._timer = timer
        timer.stop()

    def collect(self) -> StepResult:
        """Wait for the step and return what it emitted."""
        seconds = self._timer.wait()
        answers: list[list[int]] = self._rows.tolist()
        reasons = map(self._reasons.get, range(len(answers)))
        rows = tuple(map(read_answer, answers, reasons))
        is_chunk_finite: list[bool] = self._is_chunk_finite.tolist()
        failed = tuple(idx for idx, is_finite in enumerate(is_chunk_finite) if not is_finite)
        rows = self._logprobs.join(rows)
        return StepResult(self._step_idx, rows, seconds, failed, self._logprobs.of_chunks())


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
