"""Comments in a stream of server-sent events while its first message is not there yet.

A long queue or prefill says nothing for minutes, and proxies cut what is silent. Clients skip comments.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")

COMMENT = b": keep-alive\n\n"


async def with_keep_alive(
    messages: AsyncGenerator[T, None], seconds: float
) -> AsyncGenerator[T | bytes, None]:
    """Yield `messages`, and before the first one a comment each time `seconds` have passed.

    Later messages are not watched: what they cost counts in every step, and a stream that has begun is
    seldom silent for long.
    """
    async with aclosing(messages):
        first = asyncio.ensure_future(anext(messages))
        try:
            while not (await asyncio.wait({first}, timeout=seconds))[0]:
                yield COMMENT
            try:
                message = first.result()
            except StopAsyncIteration:
                return
            yield message
        finally:
            if not first.done():
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
        async for message in messages:
            yield message
