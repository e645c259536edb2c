"""Calls of functions in the steps of a call: what was text becomes content and calls.

Finding calls in text is left to `tool_formats`, writing them as JSON to `streaming`.
"""

import dataclasses
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from app.generation import CallDelta, ChoiceDelta
from app.tool_calls import CallArguments, CallStart, Piece
from app.tool_formats import ToolParser


async def with_calls(
    steps: AsyncGenerator[list[ChoiceDelta], None], make_parser: Callable[[], ToolParser], is_one_call: bool
) -> AsyncGenerator[list[ChoiceDelta], None]:
    """Yield `steps` with the calls taken out of their texts; `is_one_call` drops all but the first."""
    readers: dict[int, CallReader] = {}
    async with aclosing(steps):
        async for deltas in steps:
            read = []
            for delta in deltas:
                if delta.index not in readers:
                    readers[delta.index] = CallReader(make_parser(), is_one_call)
                read.append(readers[delta.index].read(delta))
            yield read


class CallReader:
    """The calls of one choice, numbered from 0 as they come."""

    def __init__(self, parser: ToolParser, is_one_call: bool) -> None:
        self._parser = parser
        self._is_one_call = is_one_call
        self._num_calls = 0

    def read(self, delta: ChoiceDelta) -> ChoiceDelta:
        """Return a step with its text split. An answer that called something ends for that reason."""
        pieces = self._parser.feed(delta.text)
        if delta.end is not None:
            pieces += self._parser.flush()
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = self._calls(pieces)
        end = "tool_calls" if delta.end == "stop" and self._num_calls else delta.end
        return dataclasses.replace(delta, text=content, calls=calls, end=end)

    def _calls(self, pieces: list[Piece]) -> tuple[CallDelta, ...]:
        deltas: list[CallDelta] = []
        for piece in pieces:
            if isinstance(piece, CallStart):
                deltas.append(CallDelta(self._num_calls, "", f"call_{uuid.uuid4().hex[:24]}", piece.name))
                self._num_calls += 1
            elif isinstance(piece, CallArguments):
                last = self._num_calls - 1
                if deltas and deltas[-1].call_idx == last:
                    arguments = deltas[-1].arguments + piece.text
                    deltas[-1] = dataclasses.replace(deltas[-1], arguments=arguments)
                else:
                    deltas.append(CallDelta(last, piece.text))
        return tuple(delta for delta in deltas if not self._is_one_call or delta.call_idx == 0)
