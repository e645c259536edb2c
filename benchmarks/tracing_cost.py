"""What tracing costs a server's process: processor time per step of a request, and per request.

    python -m benchmarks.tracing_cost

A scripted engine yields deltas at once, so that nothing but the tracing differs between the two. What a step
itself takes is left to `eyas bench`.
"""

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from app.call import CallOptions, CompletionCall
from app.call_trace import TracedEngine
from app.outcomes import Ending
from engine import EngineFacts, EngineStats, FinishReason, Request, SamplingParams, SequenceDelta
from ops.tracing.context import TraceSource
from ops.tracing.export import SpanExport

NUM_REQUESTS, NUM_STEPS, NUM_ROUNDS = 500, 64, 5


class Discard(SpanExporter):
    """A receiver that costs nothing."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        del spans
        return SpanExportResult.SUCCESS


class ScriptedEngine:
    """Gives every request `num_steps` deltas."""

    def __init__(self, num_steps: int) -> None:
        values = {field.name: None for field in dataclasses.fields(EngineFacts)}
        self.facts = EngineFacts(**values)  # type: ignore[arg-type]  # nothing reads them here
        self._num_steps = num_steps

    async def generate(self, request: Request) -> AsyncGenerator[SequenceDelta, None]:
        for idx in range(self._num_steps):
            end = FinishReason.LENGTH if idx + 1 == self._num_steps else None
            yield SequenceDelta(request.request_id, (1, 2), 1, end, idx + 1, 4 * idx, idx, 0, None, 1.0)

    def finish(self, request_id: str) -> None:
        del request_id

    async def stats(self) -> EngineStats:
        raise AssertionError("nobody asks")

    def check_health(self) -> None:
        return None

    async def shutdown(self) -> None:
        return None


async def run(num_steps: int, is_traced: bool) -> float:
    """Return the processor seconds of the requests."""
    export = SpanExport(Discard(), Resource({}))
    scripted = ScriptedEngine(num_steps)
    engine = TracedEngine(scripted, export)
    source = TraceSource(1.0 if is_traced else 0.0)
    options = CallOptions("m", SamplingParams(), 128, 1, (), False, True, True, False, False)
    call = CompletionCall(((1,),), options)
    start = time.thread_time()
    for idx in range(NUM_REQUESTS):
        request = Request(f"call{idx}-0", (1,), SamplingParams())
        context = source.open({})
        if context is None:
            async for _ in scripted.generate(request):
                pass
            continue
        with engine.watch(call, f"call{idx}", context, Ending("answered")):
            async for _ in engine.generate(request):
                pass
    seconds = time.thread_time() - start
    export.close()
    return seconds


async def main() -> None:
    """Print the least of a few rounds: other load only adds."""
    costs = {}
    for num_steps in (1, NUM_STEPS):
        plain = min([await run(num_steps, False) for _ in range(NUM_ROUNDS)])
        traced = min([await run(num_steps, True) for _ in range(NUM_ROUNDS)])
        costs[num_steps] = (traced - plain) / NUM_REQUESTS
    per_step = (costs[NUM_STEPS] - costs[1]) / (NUM_STEPS - 1)
    print(f"per request {(costs[1] - per_step) * 1e6:.1f} us, per step of a request {per_step * 1e6:.2f} us")


if __name__ == "__main__":
    asyncio.run(main())
