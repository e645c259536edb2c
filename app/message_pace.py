"""How many messages a second a server lets go out, over all its streams.

Between the server and the HTTP front a message costs about the same however many tokens it carries, and what
is sent faster than it is carried piles up where nobody sees it. What shares a message is left to
`generation`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

MESSAGES_PER_SECOND = 2000.0
SLACK_S = 0.002  # messages that take no longer are not waited for: timers are no finer


class MessagePace:
    """Shared by the streams of one server; each awaits its `turn` after every message."""

    def __init__(
        self,
        messages_per_second: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._interval = 1 / messages_per_second
        self._clock, self._sleep = clock, sleep
        self._carried_at = 0.0  # when all that went out will have been carried

    async def turn(self) -> None:
        """Count a message, and wait until all that went out so far, over all streams, has been carried."""
        now = self._clock()
        self._carried_at = max(self._carried_at, now) + self._interval
        if (wait := self._carried_at - now) > SLACK_S:
            await self._sleep(wait)


async def no_turn() -> None:
    """Wait for nothing: an answer that is not streamed is one message."""
