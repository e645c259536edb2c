"""Measures speculation against plain decoding on one engine, in paired rounds of one run.

Both arms get the same prompts and emit the same number of tokens, so the speed-up of a round is a ratio of
times. Printing is left to `cli_bench`, prompts to `bench_prompts`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.intervals import ratio_interval
from app.offline import Completion, StepEngine, run_to_end
from engine import Request, SamplingParams

PLAIN = "off"
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What is measured: `rounds` pairs per batch size, answers of `max_tokens` tokens at temperature 0."""

    prompts: tuple[tuple[int, ...], ...]
    batches: tuple[int, ...]
    max_tokens: int
    rounds: int
    tree: str


@dataclass(frozen=True, slots=True)
class Run:
    """One batch on one arm."""

    seconds: float
    prompts: Sequence[tuple[int, ...]]
    completions: list[Completion]

    @property
    def num_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def num_calls(self) -> int:
        return sum(completion.num_calls for completion in self.completions)


@dataclass(frozen=True, slots=True)
class Pair:
    """One round: plain decoding and speculation on the same prompts."""

    plain: Run
    speculative: Run


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a speculative answer first leaves plain decoding's: after `tokens`, prompt included."""

    tokens: tuple[int, ...]
    plain: int
    speculative: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm at one batch size; the interval is that of `speedup` over plain decoding, at 95%.

    `context` is the mean length of the prompts. All but `divergences` of `rows` answers equal plain
    decoding's token for token.
    """

    batch: int
    context: int
    arm: str
    tokens_per_second: float
    tokens_per_call: float
    speedup: float
    ci_low: float
    ci_high: float
    rows: int
    divergences: tuple[Divergence, ...]

    @property
    def identical_rows(self) -> int:
        return self.rows - len(self.divergences)


def measure(engine: StepEngine, plan: BenchPlan, clock: Callable[[], float]) -> list[Cell]:
    """Return two cells per batch size, plain decoding first. Arms alternate ABBA from round to round."""
    cells = []
    for batch in plan.batches:
        for arm in (PLAIN, plan.tree):
            _run(engine, _prompts(plan, batch, 0), arm, min(WARM_UP_TOKENS, plan.max_tokens), clock)
        pairs = [_run_pair(engine, plan, batch, round_idx, clock) for round_idx in range(plan.rounds)]
        prompts = [prompt for idx in range(plan.rounds) for prompt in _prompts(plan, batch, idx)]
        context = round(sum(map(len, prompts)) / len(prompts))
        cells += [_cell(PLAIN, batch, context, [(p.plain, p.plain) for p in pairs])]
        cells += [_cell(plan.tree, batch, context, [(p.plain, p.speculative) for p in pairs])]
    return cells


def _prompts(plan: BenchPlan, batch: int, round_idx: int) -> list[tuple[int, ...]]:
    """Each round takes the next prompts, so that no text dominates; both arms of a round share them."""
    start = round_idx * batch
    return [plan.prompts[(start + row) % len(plan.prompts)] for row in range(batch)]


def _run_pair(
    engine: StepEngine, plan: BenchPlan, batch: int, round_idx: int, clock: Callable[[], float]
) -> Pair:
    prompts = _prompts(plan, batch, round_idx)
    arms = (PLAIN, plan.tree) if round_idx % 2 == 0 else (plan.tree, PLAIN)
    runs = [_run(engine, prompts, arm, plan.max_tokens, clock) for arm in arms]
    return Pair(*runs) if round_idx % 2 == 0 else Pair(*reversed(runs))


def _run(
    engine: StepEngine,
    prompts: Sequence[tuple[int, ...]],
    arm: str,
    max_tokens: int,
    clock: Callable[[], float],
) -> Run:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, speculation=arm)
    requests = [Request(f"row-{row}", prompt, sampling) for row, prompt in enumerate(prompts)]
    start = clock()
    completions = run_to_end(engine, requests)
    return Run(clock() - start, prompts, completions)


def _cell(arm: str, batch: int, context: int, pairs: Sequence[tuple[Run, Run]]) -> Cell:
    """Sum the rounds of one arm; each comes with the plain run of its round."""
    speedup, low, high = ratio_interval([(plain.seconds, run.seconds) for plain, run in pairs])
    rows = [
        (prompt, left.token_ids, right.token_ids)
        for plain, run in pairs
        for prompt, left, right in zip(run.prompts, plain.completions, run.completions, strict=True)
    ]
    num_tokens = sum(run.num_tokens for _, run in pairs)
    return Cell(
        batch=batch,
        context=context,
        arm=arm,
        tokens_per_second=num_tokens / sum(run.seconds for _, run in pairs),
        tokens_per_call=num_tokens / sum(run.num_calls for _, run in pairs),
        speedup=speedup,
        ci_low=low,
        ci_high=high,
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
