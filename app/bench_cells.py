"""Measures one cell, a batch of sequences behind cached contexts, on an engine with replayed acceptance.

A run is two: (time of 193 tokens - time of 1 token) / 192 with every request given at once, to the last token
of the last.
Which cells are measured is left to `bench_synthetic`, printing to `bench_report`.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.bench import PLAIN
from app.bench_trace import Trace, trace_steps
from app.intervals import ratio_interval
from engine import (
    FinishReason,
    MachineRates,
    Request,
    SamplingParams,
    StepError,
    SyntheticEngine,
    WorkPart,
)

LONG, SHORT = 193, 1
MIN_ROUNDS = 3
HOST_TOKENS = 25
_NUM_WARM_STEPS = 4
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads consecutive numbers over all 64 bits
_MASK = (1 << 63) - 1

Prompts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured: `batch` sequences behind `context` cached tokens, over each of `arms`."""

    context: int
    batch: int
    temperature: float
    top_p: float
    arms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Effort:
    """At most `rounds` rounds; once the clock passes `deadline` none begins but the first three. `is_traced`
    asks for the kernels of a few steps, too.
    """

    rounds: int
    deadline: float
    is_traced: bool = False


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm of a cell. Milliseconds are medians over rounds.

    `ms_per_token` is per token of each sequence; `ms_per_step` that of a step in which all rows run.
    `ms_limit` is the least a step can take on this machine. `idle_share` is the device's time between steps.
    `ms_host` is the work of the host per step and `trace` what the device does in one, both measured apart;
    the latter where it was asked for. `speedup` is over plain decoding in the same
    rounds, with its interval at 95%, (value, low, high); None without plain decoding beside it.
    """

    arm: str
    rounds: int
    ms_per_token: float
    best_ms_per_token: float
    tokens_per_call: float
    ms_per_step: float
    ms_limit: float
    idle_share: float
    ms_host: float
    trace: Trace | None
    speedup: tuple[float, float, float] | None
    seconds_per_round: tuple[float, ...]

    @property
    def roofline_share(self) -> float:
        return self.ms_limit / self.ms_per_step


@dataclass(frozen=True, slots=True)
class _Run:
    """All requests of one arm. `seconds` are those from `add` to the last token, `whole_seconds` to when the
    device is done, which may have begun another step by then; `steps` are the seconds of the steps that all
    rows ran.
    """

    seconds: float
    whole_seconds: float
    num_tokens: int
    num_calls: int
    device_seconds: float
    steps: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Round:
    long: _Run
    short: _Run

    @property
    def seconds_per_token(self) -> float:
        return (self.long.seconds - self.short.seconds) / (LONG - SHORT)


def measure_cell(
    bench: SyntheticEngine, cell: Cell, rates: MachineRates, effort: Effort, clock: Callable[[], float]
) -> list[ArmResult]:
    """Return a result per arm, from rounds that alternate ABBA."""
    prompts = bench.random_prompts(cell.batch, cell.context)
    for arm in cell.arms:
        bench.engine.capture(arm, cell.batch)
        # Whatever else is compiled or allocated at first use.
        _run(bench, cell, prompts, arm, HOST_TOKENS, 0, clock)
    found: dict[str, list[_Round]] = {arm: [] for arm in cell.arms}
    for round_idx in range(effort.rounds):
        if round_idx >= MIN_ROUNDS and clock() > effort.deadline:
            break
        for arm in cell.arms if round_idx % 2 == 0 else reversed(cell.arms):
            short = _run(bench, cell, prompts, arm, SHORT, round_idx, clock)
            found[arm].append(_Round(_run(bench, cell, prompts, arm, LONG, round_idx, clock), short))
    results = []
    for arm in cell.arms:
        host_seconds = time_host(bench, cell, prompts, arm, clock)
        trace = trace_arm(bench, cell, prompts, arm) if effort.is_traced else None
        ms_limit = 1e3 * limit_seconds(bench.work(arm, cell.batch, cell.context), rates)
        plain = None if arm == PLAIN else found.get(PLAIN)
        results.append(_summarise(arm, found[arm], plain, ms_limit, 1e3 * host_seconds, trace))
    return results


def trace_arm(bench: SyntheticEngine, cell: Cell, prompts: Prompts, arm: str) -> Trace | None:
    """Trace a few steps that all rows run."""
    bench.cache(prompts)
    for request in make_requests(cell, prompts, arm, LONG, 0):
        bench.engine.add(request)
    for _ in range(_NUM_WARM_STEPS):
        bench.engine.step()
    trace = trace_steps(bench)
    while bench.engine.has_work:
        bench.engine.step()
    return trace


def time_host(
    bench: SyntheticEngine, cell: Cell, prompts: Prompts, arm: str, clock: Callable[[], float]
) -> float:
    """Return the median seconds that a call of `step` takes where it never finds the device at work."""
    bench.cache(prompts)
    for request in make_requests(cell, prompts, arm, HOST_TOKENS, 0):
        bench.engine.add(request)
    times = []
    while bench.engine.has_work:
        bench.synchronize()
        start = clock()
        deltas = bench.engine.step()
        if len(deltas) == cell.batch:
            times.append(clock() - start)
    return statistics.median(times)


def _run(
    bench: SyntheticEngine,
    cell: Cell,
    prompts: Prompts,
    arm: str,
    max_tokens: int,
    round_idx: int,
    clock: Callable[[], float],
) -> _Run:
    """Cache the contexts anew, add every request and step to the end. Raises `StepError`."""
    engine = bench.engine
    bench.cache(prompts)
    requests = make_requests(cell, prompts, arm, max_tokens, round_idx)
    steps: list[float] = []
    num_tokens = num_calls = 0
    before = engine.stats()
    bench.synchronize()
    start = now = last_token = clock()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        deltas = engine.step()
        last, now = now, clock()
        if len(deltas) == cell.batch and not any(delta.finish_reason for delta in deltas):
            steps.append(now - last)
        for delta in deltas:
            if delta.finish_reason is FinishReason.ERROR or delta.num_prefix_hits != cell.context:
                raise StepError(delta.message or "a context was not found in the cache")
            num_tokens += len(delta.token_ids)
            num_calls += 1
            last_token = now
    device_seconds = engine.stats().step_seconds - before.step_seconds
    # The first of the steps also admitted the rows.
    return _Run(last_token - start, now - start, num_tokens, num_calls, device_seconds, tuple(steps[1:]))


def make_requests(cell: Cell, prompts: Prompts, arm: str, max_tokens: int, round_idx: int) -> list[Request]:
    """Return a request per prompt; the seeds, and so the acceptance, are those of the round in every arm."""
    return [
        Request(
            f"row-{row}",
            prompt,
            SamplingParams(
                temperature=cell.temperature,
                top_p=cell.top_p,
                max_tokens=max_tokens,
                ignore_eos=True,
                seed=(round_idx * cell.batch + row + 1) * _GOLDEN & _MASK,
                speculation=arm,
            ),
        )
        for row, prompt in enumerate(prompts)
    ]


def _summarise(
    arm: str,
    rounds: Sequence[_Round],
    plain_rounds: Sequence[_Round] | None,
    ms_limit: float,
    ms_host: float,
    trace: Trace | None,
) -> ArmResult:
    seconds = [r.seconds_per_token for r in rounds]
    speedup = None
    if plain_rounds is not None:
        plain = [r.seconds_per_token for r in plain_rounds]
        speedup = ratio_interval(list(zip(plain, seconds, strict=True)))
    wall = sum(r.long.whole_seconds - r.short.whole_seconds for r in rounds)
    device = sum(r.long.device_seconds - r.short.device_seconds for r in rounds)
    steps = [step for r in rounds for step in r.long.steps]
    return ArmResult(
        arm=arm,
        rounds=len(rounds),
        ms_per_token=1e3 * statistics.median(seconds),
        best_ms_per_token=1e3 * min(seconds),
        tokens_per_call=sum(r.long.num_tokens for r in rounds) / sum(r.long.num_calls for r in rounds),
        ms_per_step=1e3 * statistics.median(steps),
        ms_limit=ms_limit,
        idle_share=1 - device / wall,
        ms_host=ms_host,
        trace=trace,
        speedup=speedup,
        seconds_per_round=tuple(seconds),
    )


def limit_seconds(parts: Sequence[WorkPart], rates: MachineRates) -> float:
    """Return the sum over the parts of a step of the larger of the times to move and to multiply."""
    return sum(max(part.num_bytes / rates.bandwidth, part.num_flops / rates.flops) for part in parts)
