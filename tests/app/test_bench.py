"""The benchmark's arithmetic: paired arms in ABBA order, ratios of times, intervals that cover the truth."""

import dataclasses
from dataclasses import dataclass, field

from app.bench import BenchPlan, Cell, Divergence, measure
from engine import EngineFacts, EngineStats, FinishReason, Request, SequenceDelta
from tests.app.harness import make_facts


@dataclass
class TimedEngine:
    """Answers at once and moves a clock: 1 s a token plainly, half of it over a tree, two tokens a call. Its
    device works for three quarters of the time.
    """

    differing: frozenset[int] = frozenset()
    now: float = 0.0
    log: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    facts: EngineFacts = field(default_factory=make_facts)
    _queue: list[Request] = field(default_factory=list)

    @property
    def has_work(self) -> bool:
        return bool(self._queue)

    def add(self, request: Request) -> None:
        self.log.append((request.sampling.speculation, request.prompt_token_ids))
        self._queue.append(request)

    def step(self) -> list[SequenceDelta]:
        request = self._queue.pop(0)
        is_plain = request.sampling.speculation == "off"
        num_tokens = request.sampling.max_tokens
        self.now += num_tokens * (1.0 if is_plain else 0.5)
        first = request.prompt_token_ids[0]
        is_other = not is_plain and first in self.differing
        token_ids = (first + is_other,) * num_tokens
        num_calls = num_tokens if is_plain else num_tokens // 2
        return [SequenceDelta(request.request_id, token_ids, 0, FinishReason.LENGTH, num_calls, 0, 0, 0)]

    def stats(self) -> EngineStats:
        counts = dict.fromkeys((field.name for field in dataclasses.fields(EngineStats)), 0)
        return EngineStats(**(counts | {"step_seconds": self.now * 0.75}))


def make_plan(**fields: object) -> BenchPlan:
    prompts = tuple((idx * 10, 1, 2) for idx in range(5))
    defaults = {"prompts": prompts, "batches": (2,), "max_tokens": 10, "rounds": 3, "trees": ("tree-8",)}
    return BenchPlan(**(defaults | fields))


def make_cell(arm: str, rows: int, identical_rows: int) -> Cell:
    divergences = tuple(Divergence((7, 8), 1, 2) for _ in range(rows - identical_rows))
    return Cell(1, 5, arm, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, rows, divergences)


def test_cells_hold_the_ratios_of_what_was_timed() -> None:
    engine = TimedEngine()
    plain, speculative = measure(engine, make_plan(), lambda: engine.now)
    assert (plain.arm, plain.batch, plain.context) == ("off", 2, 3)
    assert (plain.tokens_per_second, plain.tokens_per_call, plain.speedup) == (1.0, 1.0, 1.0)
    assert (plain.ci_low, plain.ci_high) == (1.0, 1.0)
    assert (speculative.tokens_per_second, speculative.tokens_per_call, speculative.speedup) == (
        2.0,
        2.0,
        2.0,
    )
    assert (speculative.ci_low, speculative.ci_high) == (2.0, 2.0)
    assert (speculative.rows, speculative.identical_rows) == (6, 6)
    assert plain.idle_share == speculative.idle_share == 0.25


def test_arms_alternate_and_share_their_prompts() -> None:
    engine = TimedEngine()
    measure(engine, make_plan(batches=(1,), rounds=4), lambda: engine.now)
    warm_up, timed = engine.log[:2], engine.log[2:]
    assert [arm for arm, _ in warm_up] == ["off", "tree-8"]
    arms = [arm for arm, _ in timed]
    assert arms == ["off", "tree-8", "tree-8", "off", "off", "tree-8", "tree-8", "off"]
    prompts = [prompt for _, prompt in timed]
    assert prompts[::2] == prompts[1::2]
    assert len(set(prompts)) == 4


def test_every_tree_of_a_round_is_held_against_the_plain_decoding_beside_it() -> None:
    engine = TimedEngine()
    cells = measure(engine, make_plan(batches=(1, 2), trees=("chain-3", "tree-8")), lambda: engine.now)
    assert [(cell.batch, cell.arm) for cell in cells] == [
        (batch, arm) for batch in (1, 2) for arm in ("off", "chain-3", "tree-8")
    ]
    assert [cell.speedup for cell in cells] == [1.0, 2.0, 2.0] * 2
    arms = [arm for arm, _ in engine.log[3:12]]
    assert arms == ["off", "chain-3", "tree-8", "tree-8", "chain-3", "off", "off", "chain-3", "tree-8"]


def test_rows_that_differ_are_counted() -> None:
    engine = TimedEngine(differing=frozenset({10}))
    _, speculative = measure(engine, make_plan(batches=(1,), rounds=5), lambda: engine.now)
    assert (speculative.rows, speculative.identical_rows) == (5, 4)
