"""What the device does during a few steps, kernel by kernel: how long it idles, and what takes its time.

Steps are timed without it in `bench_cells`: tracing slows them down.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile

from engine import SyntheticEngine

NUM_STEPS = 8
MOST_KERNELS = 40


@dataclass(frozen=True, slots=True)
class Span:
    """One kernel or copy on the device, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Kernel:
    """All launches of one kernel in a step, on average."""

    name: str
    num_launches: float
    microseconds: float


@dataclass(frozen=True, slots=True)
class Trace:
    """A mean step. `idle_share` is the time in which nothing ran, from the first kernel to the last; kernels
    that overlap count once in it, and each for itself in `kernels`, the longest first.
    """

    idle_share: float
    ms_per_step: float
    num_launches: float
    kernels: tuple[Kernel, ...]


def trace_steps(bench: SyntheticEngine, num_steps: int = NUM_STEPS) -> Trace | None:
    """Trace the next steps of an engine at work; None where there is no GPU to trace."""
    if not bench.engine.facts.device.startswith("cuda"):
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            bench.engine.step()
        bench.synchronize()
    spans = [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type.name == "CUDA"
    ]
    return summarise(spans, num_steps)


def summarise(spans: Sequence[Span], num_steps: int) -> Trace | None:
    """Return the mean step of `num_steps`; None where nothing was seen."""
    if not spans:
        return None
    first, end = min(span.start for span in spans), max(span.end for span in spans)
    busy, reached = 0.0, first
    for span in sorted(spans, key=lambda span: span.start):
        busy += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    by_name: dict[str, list[float]] = {}
    for span in spans:
        by_name.setdefault(span.name, []).append(span.end - span.start)
    kernels = [
        Kernel(name, len(times) / num_steps, sum(times) / num_steps) for name, times in by_name.items()
    ]
    kernels.sort(key=lambda kernel: -kernel.microseconds)
    return Trace(
        idle_share=1 - busy / (end - first),
        ms_per_step=(end - first) / num_steps / 1000,
        num_launches=len(spans) / num_steps,
        kernels=tuple(kernels[:MOST_KERNELS]),
    )
