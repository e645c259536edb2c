"""Measures speculation against plain decoding over HTTP, in blocks that cancel what drifts.

Both arms ask one server the same prompts, told apart by the `speculation` of each request. Judging is left to
`speedup_verdict`, what the client times to `loadtest.sse_client`.
"""

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from app.intervals import ratio_interval
from engine import StepError
from loadtest.prompts import CLASSES, Prompt, cycle
from loadtest.record import Record
from loadtest.sse_client import Question, SSEClient

PLAIN = "off"
WARM_UP_TOKENS = 8
ORDERS = ("ABBA", "BAAB")  # of plain (A) and speculative (B) runs, block by block in turn

AskTogether = Callable[[Sequence[Question]], list[Record]]


@dataclass(frozen=True, slots=True)
class SpeedupPlan:
    """What is measured: for each batch size `num_blocks` blocks of four runs; `arm` is "auto" or a tree."""

    model: str
    arm: str
    batches: tuple[int, ...]
    num_blocks: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """Seconds of the two runs of each arm in one block."""

    plain: float
    speculative: float


@dataclass(frozen=True, slots=True)
class SpeedupCell:
    """One batch size: how many times faster speculation is, with its interval at 95% over the blocks.

    `num_equal` of `num_pairs` speculative answers have the text and the number of tokens of plain decoding's.
    """

    batch: int
    speedup: float
    low: float
    high: float
    plain_tokens_per_second: float
    speculative_tokens_per_second: float
    tokens_per_call: float | None
    num_pairs: int
    num_equal: int
    blocks: tuple[BlockTimes, ...]


@dataclass(frozen=True, slots=True)
class _Block:
    plain: tuple[list[Record], list[Record]]
    speculative: tuple[list[Record], list[Record]]

    @property
    def times(self) -> BlockTimes:
        return BlockTimes(sum(map(seconds_of, self.plain)), sum(map(seconds_of, self.speculative)))


def prompts_digest() -> str:
    """Return what tells whether two runs asked the same prompts in the same blocks."""
    return hashlib.sha256(
        "\n".join(prompt for texts in CLASSES.values() for prompt in texts).encode()
    ).hexdigest()


def ask_together(client: SSEClient) -> AskTogether:
    """Return what asks several questions at one moment, each in a thread of its own."""

    def ask(questions: Sequence[Question]) -> list[Record]:
        barrier = threading.Barrier(len(questions))

        def ask_one(question: Question) -> Record:
            barrier.wait()
            return client.ask(question)

        with ThreadPoolExecutor(len(questions)) as pool:
            return list(pool.map(ask_one, questions))

    return ask


def measure(ask: AskTogether, plan: SpeedupPlan, observe: Callable[[SpeedupCell], None]) -> list[SpeedupCell]:
    """Return a cell per batch size, each told to `observe` as it comes. Raises `StepError` where a request
    fails: a speed is not known then.
    """
    cells = []
    for batch in plan.batches:
        prompts = cycle(list(CLASSES))
        for arm in (PLAIN, plan.arm):
            _run(
                ask,
                plan,
                list(islice(cycle(list(CLASSES)), batch)),
                arm,
                min(WARM_UP_TOKENS, plan.max_tokens),
            )
        blocks = [_block(ask, plan, prompts, batch, ORDERS[idx % 2]) for idx in range(plan.num_blocks)]
        cells.append(_cell(batch, blocks))
        observe(cells[-1])
    return cells


def seconds_of(records: Sequence[Record]) -> float:
    """Return the time of one run: from the first request to the last token of any."""
    return max(record.chunks[-1][0] for record in records) - min(record.sent for record in records)


def _block(ask: AskTogether, plan: SpeedupPlan, prompts: Iterator[Prompt], batch: int, order: str) -> _Block:
    chosen = list(islice(prompts, batch))
    _run(ask, plan, chosen, PLAIN, 1)  # so that every run of the block finds its prompts in the prefix cache
    runs: dict[str, list[list[Record]]] = {"A": [], "B": []}
    for letter in order:
        runs[letter].append(_run(ask, plan, chosen, PLAIN if letter == "A" else plan.arm, plan.max_tokens))
    return _Block((runs["A"][0], runs["A"][1]), (runs["B"][0], runs["B"][1]))


def _run(
    ask: AskTogether, plan: SpeedupPlan, prompts: Sequence[Prompt], arm: str, max_tokens: int
) -> list[Record]:
    records = ask([_question(plan, prompt, arm, max_tokens) for prompt in prompts])
    for record in records:
        if record.error is not None or not record.chunks:
            raise StepError(f"a request failed while speeds were measured: {record.error}: {record.message}")
    return records


def _question(plan: SpeedupPlan, prompt: Prompt, arm: str, max_tokens: int) -> Question:
    body = {
        "model": plan.model,
        "messages": [{"role": "user", "content": prompt.text}],
        "max_tokens": max_tokens,
        "ignore_eos": True,  # every answer has as many tokens
        "skip_special_tokens": False,  # what is compared must show every token
        "temperature": 0,
        "speculation": arm,
        "speculation_stats": True,
    }
    return Question("/v1/chat/completions", body, prompt.prompt_class, prompt.idx)


def _cell(batch: int, blocks: Sequence[_Block]) -> SpeedupCell:
    times = tuple(block.times for block in blocks)
    speedup, low, high = ratio_interval([(block.plain, block.speculative) for block in times])
    pairs = [
        pair
        for block in blocks
        for plain, speculative in zip(block.plain, block.speculative, strict=True)
        for pair in zip(plain, speculative, strict=True)
    ]
    lengths = [record.tokens_per_call for _, record in pairs if record.tokens_per_call is not None]
    return SpeedupCell(
        batch=batch,
        speedup=speedup,
        low=low,
        high=high,
        plain_tokens_per_second=sum(r.num_output_tokens for r, _ in pairs) / sum(t.plain for t in times),
        speculative_tokens_per_second=sum(r.num_output_tokens for _, r in pairs)
        / sum(t.speculative for t in times),
        tokens_per_call=sum(lengths) / len(lengths) if lengths else None,
        num_pairs=len(pairs),
        num_equal=sum(_is_equal(left, right) for left, right in pairs),
        blocks=times,
    )


def _is_equal(plain: Record, speculative: Record) -> bool:
    return (plain.text, plain.num_output_tokens) == (speculative.text, speculative.num_output_tokens)
