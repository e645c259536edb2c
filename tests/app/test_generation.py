"""Steps that are there become one delta; what they brought is neither lost nor told twice."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from app.call import CallOptions
from app.generation import ChoiceDelta, run_choices
from app.message_pace import no_turn
from app.tokenizer import Tokenizer
from engine import FinishReason, Request, SamplingParams, SequenceDelta, StepError
from tests.app.harness import SpokenEngine


class ToldEngine(SpokenEngine):
    """Gives the steps that are put into its queue, without a pause between those that are there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.steps: asyncio.Queue[SequenceDelta] = asyncio.Queue()
        self.num_said = self.num_drafted = 0

    def say(
        self, text: str, num_kept: int = 0, num_drafted: int = 0, reason: FinishReason | None = None
    ) -> None:
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        self.num_said += 1
        self.num_drafted += num_drafted
        self.steps.put_nowait(
            SequenceDelta("r", token_ids, num_kept, reason, self.num_said, self.num_drafted, 0, 0)
        )

    async def generate(self, request: Request) -> AsyncGenerator[SequenceDelta, None]:
        while True:
            step = await self.steps.get()
            yield step
            if step.finish_reason is not None:
                return


@pytest.fixture
def told(tokenizer: Tokenizer) -> ToldEngine:
    return ToldEngine(tokenizer)


class Gate:
    """A turn that comes when it is opened."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()

    async def turn(self) -> None:
        await self.is_open.wait()
        self.is_open.clear()


def deltas_of(
    engine: SpokenEngine, turn=no_turn, stops: tuple[str, ...] = ()
) -> AsyncGenerator[list[ChoiceDelta], None]:
    sampling = SamplingParams(max_tokens=100)
    options = CallOptions("m", sampling, None, 1, stops, False, True, True, False, False)
    return run_choices(engine, engine.tokenizer, [Request("r", (2, 3), sampling)], options, turn)


async def test_steps_that_come_before_the_turn_are_one_delta(told: ToldEngine) -> None:
    gate = Gate()
    stream = deltas_of(told, gate.turn)
    told.say("He", 1, 4)
    (first,) = await anext(stream)
    assert (first.text, first.num_tokens, first.drafts) == ("He", 2, ((4, 1),))
    told.say("ll", 1, 4)
    told.say("o", 0, 0)
    told.say(", world", 6, 7, FinishReason.LENGTH)
    gate.is_open.set()
    (second,) = await anext(stream)
    assert (second.text, second.num_tokens, second.end) == ("llo, world", 12, "length")
    assert second.drafts == ((4, 1), (0, 0), (7, 6))
    gate.is_open.set()
    assert [delta async for delta in stream] == []


async def test_steps_that_come_apart_are_told_apart_where_nobody_waits(told: ToldEngine) -> None:
    stream = deltas_of(told)
    for piece in ("a", "b"):
        told.say(piece)
        assert [delta.text for delta in await anext(stream)] == [piece]
    await stream.aclose()


async def test_what_came_before_a_failure_is_told_before_it(told: ToldEngine) -> None:
    stream = deltas_of(told)
    told.say("good")
    told.say("", reason=FinishReason.ERROR)
    assert [delta.text for delta in await anext(stream)] == ["good"]
    with pytest.raises(StepError):
        await anext(stream)


async def test_a_stop_string_in_the_first_of_several_steps_ends_the_answer(told: ToldEngine) -> None:
    stream = deltas_of(told, stops=("!",))
    told.say("yes!")
    told.say("no")
    (delta,) = await anext(stream)
    assert (delta.text, delta.num_tokens, delta.end) == ("yes", 4, "stop")
    assert [delta async for delta in stream] == []
    assert told.finished == ["r"]
