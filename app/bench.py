"""Measures trees against plain decoding on one engine, in paired rounds of one run.

All arms get the same prompts and emit the same number of tokens, so the speed-up of a round is a ratio of
times. Printing is left to `cli_bench`, prompts to `bench_prompts`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.intervals import ratio_interval
from app.offline import Completion, StepEngine, run_to_end
from engine import Request, SamplingParams

PLAIN = "off"


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What is measured: `rounds` rounds per batch size, each of plain decoding and every tree once; answers
    have `max_tokens` tokens at temperature 0.
    """

    prompts: tuple[tuple[int, ...], ...]
    batches: tuple[int, ...]
    max_tokens: int
    rounds: int
    trees: tuple[str, ...]

    @property
    def arms(self) -> tuple[str, ...]:
        return (PLAIN, *self.trees)


@dataclass(frozen=True, slots=True)
class Run:
    """One batch on one arm. `seconds` are those to the last token, `whole_seconds` to when the device is
    done, which may have begun another step by then; it worked for `device_seconds` of them.
    """

    seconds: float
    whole_seconds: float
    device_seconds: float
    prompts: Sequence[tuple[int, ...]]
    completions: list[Completion]

    @property
    def num_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def num_calls(self) -> int:
        return sum(completion.num_calls for completion in self.completions)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a speculative answer first leaves plain decoding's: after `tokens`, prompt included."""

    tokens: tuple[int, ...]
    plain: int
    speculative: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm at one batch size; the interval is that of `speedup` over plain decoding, at 95%.

    `context` is the mean length of the prompts, `idle_share` the device's time between steps. All but
    `divergences` of `rows` answers equal plain decoding's token for token.
    """

    batch: int
    context: int
    arm: str
    tokens_per_second: float
    tokens_per_call: float
    speedup: float
    ci_low: float
    ci_high: float
    idle_share: float
    rows: int
    divergences: tuple[Divergence, ...]

    @property
    def identical_rows(self) -> int:
        return self.rows - len(self.divergences)


def measure(engine: StepEngine, plan: BenchPlan, clock: Callable[[], float]) -> list[Cell]:
    """Return a cell per batch size and arm, plain decoding first. Arms alternate ABBA from round to round,
    after one that does not count: there kernels are compiled, and the dispatcher meets the batch.
    """
    cells = []
    for batch in plan.batches:
        for arm in plan.arms:
            _run(engine, _prompts(plan, batch, plan.rounds), arm, plan.max_tokens, clock)
        runs: dict[str, list[Run]] = {arm: [] for arm in plan.arms}
        for round_idx in range(plan.rounds):
            prompts = _prompts(plan, batch, round_idx)
            for arm in plan.arms if round_idx % 2 == 0 else reversed(plan.arms):
                runs[arm].append(_run(engine, prompts, arm, plan.max_tokens, clock))
        cells += [_cell(arm, batch, runs[PLAIN], runs[arm]) for arm in plan.arms]
    return cells


def _prompts(plan: BenchPlan, batch: int, round_idx: int) -> list[tuple[int, ...]]:
    """Each round takes the next prompts, so that no text dominates; both arms of a round share them."""
    start = round_idx * batch
    return [plan.prompts[(start + row) % len(plan.prompts)] for row in range(batch)]


def _run(
    engine: StepEngine,
    prompts: Sequence[tuple[int, ...]],
    arm: str,
    max_tokens: int,
    clock: Callable[[], float],
) -> Run:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, speculation=arm)
    requests = [Request(f"row-{row}", prompt, sampling) for row, prompt in enumerate(prompts)]
    before = engine.stats().step_seconds
    last_token = start = clock()

    def note_time() -> None:
        nonlocal last_token
        last_token = clock()

    completions = run_to_end(engine, requests, note_time)
    whole, device = clock() - start, engine.stats().step_seconds - before
    return Run(last_token - start, whole, device, prompts, completions)


def _cell(arm: str, batch: int, plain_runs: Sequence[Run], runs: Sequence[Run]) -> Cell:
    """Sum the rounds of one arm, beside those of plain decoding."""
    pairs = list(zip(plain_runs, runs, strict=True))
    speedup, low, high = ratio_interval([(plain.seconds, run.seconds) for plain, run in pairs])
    rows = [
        (prompt, left.token_ids, right.token_ids)
        for plain, run in pairs
        for prompt, left, right in zip(run.prompts, plain.completions, run.completions, strict=True)
    ]
    num_tokens, seconds = sum(run.num_tokens for run in runs), sum(run.seconds for run in runs)
    return Cell(
        batch=batch,
        context=round(sum(len(prompt) for prompt, _, _ in rows) / len(rows)),
        arm=arm,
        tokens_per_second=num_tokens / seconds,
        tokens_per_call=num_tokens / sum(run.num_calls for run in runs),
        speedup=speedup,
        ci_low=low,
        ci_high=high,
        idle_share=1 - sum(run.device_seconds for run in runs) / sum(run.whole_seconds for run in runs),
        rows=len(rows),
        divergences=tuple(found for row in rows if (found := _divergence(*row)) is not None),
    )


def _divergence(
    prompt: tuple[int, ...], plain: tuple[int, ...], speculative: tuple[int, ...]
) -> Divergence | None:
    """Return the first place where two answers of one length differ."""
    for idx, (left, right) in enumerate(zip(plain, speculative, strict=True)):
        if left != right:
            return Divergence((*prompt, *plain[:idx]), left, right)
    return None
