"""Where in an answer the calls of functions stand: the formats of Llama 3, and of Hermes and SmolLM2.

Reading a call is left to `tool_calls`. What only looks like a call is content, without any change.
"""

from collections.abc import Iterable
from typing import Literal, Protocol

from app.tool_calls import CallArguments, CallRun, Piece

ToolFormat = Literal["hermes", "llama3"]

OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"  # before a call of Llama 3; as a special token it is mostly not shown


class ToolParser(Protocol):
    """Splits the text of one answer into content and calls."""

    def feed(self, text: str) -> list[Piece]: ...
    def flush(self) -> list[Piece]: ...


def make_parser(tool_format: ToolFormat, names: frozenset[str]) -> ToolParser:
    """Return a parser for one answer that may call the functions `names`."""
    return HermesParser(names) if tool_format == "hermes" else Llama3Parser(names)


class HermesParser:
    """Calls inside `<tool_call>` tags: one object, or a list of them as SmolLM2 writes.

    Whitespace before a tag with calls is no content, nor is what follows one where nothing else does.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._space = ""  # may stand before a tag
        self._tag = ""  # the beginning of a tag
        self._run: CallRun | None = None
        self._has_calls = False

    def feed(self, text: str) -> list[Piece]:
        """Return what `text` completes, neighbours of one kind joined."""
        return _joined(
            piece
            for char in text
            for piece in (
                self._feed_outside(char) if self._run is None else self._feed_inside(self._run, char)
            )
        )

    def flush(self) -> list[Piece]:
        """Return what was held back; of an answer that breaks off inside a call its beginning stands."""
        run, self._run = self._run, None
        if run is not None:
            return [] if run.has_calls else self._release(OPEN_TAG + run.leftover)
        return [] if self._has_calls and not self._tag else self._release(self._tag)

    def _feed_outside(self, char: str) -> list[Piece]:
        tag, self._tag = self._tag + char, ""
        if tag == OPEN_TAG:
            self._run = CallRun(self._names, CLOSE_TAG)
            return []
        if OPEN_TAG.startswith(tag):
            self._tag = tag
            return []
        # No tag: its beginning is content, but its last character may begin another one.
        released = self._release(tag[:-1])
        if char == OPEN_TAG[0]:
            self._tag = char
        elif char.isspace():
            self._space += char
        else:
            released += self._release(char)
        return released

    def _feed_inside(self, run: CallRun, char: str) -> list[Piece]:
        had_calls = run.has_calls
        pieces = run.feed(char)
        if run.has_calls and not had_calls:
            self._has_calls = True
            self._space = ""
        if run.is_broken:
            self._run = None
            return pieces + self._release(run.leftover if run.has_calls else OPEN_TAG + run.leftover)
        if run.is_closed:
            self._run = None
            self._space = ""
        return pieces

    def _release(self, text: str) -> list[Piece]:
        """Return held whitespace and `text` as content; whitespace is kept back while nothing follows."""
        if not text and self._has_calls:
            return []
        content, self._space = self._space + text, ""
        return [content] if content else []


class Llama3Parser:
    """Calls as the whole answer: objects behind an optional `<|python_tag|>`, with `;` or nothing between."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._held = ""  # whitespace and the tag before the first call
        self._run: CallRun | None = None
        self._is_plain = False

    def feed(self, text: str) -> list[Piece]:
        """Return what `text` completes, neighbours of one kind joined."""
        if self._is_plain:
            return [text] if text else []
        return _joined(piece for char in text for piece in self._feed_one(char))

    def flush(self) -> list[Piece]:
        """Return what was held back; of an answer that breaks off inside a call its beginning stands."""
        run, self._run = self._run, None
        if run is not None and run.has_calls:
            return []
        held, self._held = self._held + (run.leftover if run is not None else ""), ""
        return [held] if held else []

    def _feed_one(self, char: str) -> list[Piece]:
        if self._is_plain:
            return [char]
        if self._run is not None:
            return self._feed_run(self._run, char)
        body = (self._held + char).lstrip()
        if PYTHON_TAG.startswith(body) or body.removeprefix(PYTHON_TAG).isspace():
            self._held += char
            return []
        if body.removeprefix(PYTHON_TAG).lstrip() in ("{", "["):
            self._run = CallRun(self._names)
            return self._feed_run(self._run, char)
        return self._give_up(char)

    def _feed_run(self, run: CallRun, char: str) -> list[Piece]:
        pieces = run.feed(char)
        if run.has_calls:
            self._held = ""
        return pieces + self._give_up(run.leftover) if run.is_broken else pieces

    def _give_up(self, text: str) -> list[Piece]:
        """Let what was held and everything from now on be content."""
        self._is_plain = True
        self._run = None
        held, self._held = self._held, ""
        return [held + text]


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, str) and isinstance(last, str):
            joined[-1] = last + piece
        elif isinstance(piece, CallArguments) and isinstance(last, CallArguments):
            joined[-1] = CallArguments(last.text + piece.text)
        else:
            joined.append(piece)
    return joined
