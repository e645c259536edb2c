"""Messages are spread above a rate, and below it nobody waits."""

import pytest

from app.message_pace import MessagePace

RATE = 512.0  # messages a second, a power of two: no rounding


class World:
    """A clock that moves when somebody sleeps, and by hand."""

    def __init__(self) -> None:
        self.now = 128.0
        self.waits: list[float] = []
        self.pace = MessagePace(RATE, lambda: self.now, self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)


async def test_nobody_waits_below_the_rate() -> None:
    world = World()
    for _ in range(50):
        await world.pace.turn()
        world.now += 1 / RATE
    assert world.waits == []


async def test_each_stream_of_a_burst_waits_for_those_ahead() -> None:
    world = World()
    for _ in range(5):
        await world.pace.turn()
    assert world.waits == pytest.approx([2 / RATE, 3 / RATE, 4 / RATE, 5 / RATE])


async def test_streams_that_never_rest_get_the_rate_between_them() -> None:
    world = World()
    due = [128.0] * 40
    num_messages = 0
    while min(due) < 133.0:
        stream = due.index(min(due))
        world.now, world.waits = max(world.now, due[stream]), []
        await world.pace.turn()
        due[stream] = world.now + sum(world.waits)
        num_messages += 1
    assert num_messages == pytest.approx(5 * RATE, rel=0.02)


async def test_a_rest_is_not_saved_up() -> None:
    world = World()
    await world.pace.turn()
    world.now += 60.0
    for _ in range(3):
        await world.pace.turn()
    assert world.waits == pytest.approx([2 / RATE, 3 / RATE])
