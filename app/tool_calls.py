"""Calls of functions in the text of a model as it grows: JSON objects with a name and arguments.

Where in an answer such objects stand is left to `tool_formats`. All is decided character by character, so
that the pieces in which a text arrives change nothing.
"""

import enum
from dataclasses import dataclass

from app.json_value import JsonValue

ARGUMENT_KEYS = ("arguments", "parameters")
NAME_KEYS = ("name", "function")
BETWEEN_CALLS = " \t\r\n,;[]"


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of function `name` begins."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of the arguments of the call that began last."""

    text: str


Piece = str | CallStart | CallArguments  # a string is content


class _Place(enum.Enum):
    """What an object may have next, outside of its values."""

    OPENING = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    COMMA = enum.auto()


class CallObject:
    """Reads one object from its `{` to its `}`.

    The call starts as soon as its name is known, and its arguments follow as they come; keys besides name and
    arguments are passed over. `is_refused` is set where it is no call of a function in `names`, `is_broken`
    where it ends before a character that no JSON has there: that character is not part of it.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._place = _Place.OPENING
        self._key = ""
        self._value: JsonValue | None = None
        self._is_argument = False
        self._has_arguments = False
        self._held = ""  # arguments that came before the name
        self.has_started = False
        self.is_over = False
        self.is_refused = False
        self.is_broken = False

    def feed(self, char: str) -> list[Piece]:
        """Return the pieces that `char` completes."""
        assert not self.is_over, "a character after the end of a call"
        value = self._value
        if value is None:
            return self._feed_between(char)
        is_taken = value.feed(char)
        pieces = self._argue(char) if self._is_argument and value.is_container else []
        if value.is_over:
            self._value = None
            pieces += self._take(value)
        if not is_taken and not self.is_over:
            pieces += self._feed_between(char)
        return pieces

    def _feed_between(self, char: str) -> list[Piece]:
        if char.isspace():
            return []
        match self._place, char:
            case _Place.OPENING, "{":
                self._place = _Place.KEY
            case ((_Place.KEY | _Place.COMMA), "}"):
                return self._end()
            case _Place.KEY, '"':
                self._value = JsonValue(char)
            case _Place.COLON, ":":
                self._place = _Place.VALUE
            case _Place.COMMA, ",":
                self._place = _Place.KEY
            case _Place.VALUE, _ if JsonValue.can_begin(char):
                return self._begin_value(char)
            case _:
                self.is_broken = True
                return self._end()
        return []

    def _begin_value(self, char: str) -> list[Piece]:
        value = self._value = JsonValue(char)
        self._is_argument = self._key in ARGUMENT_KEYS and not self._has_arguments
        return self._argue(char) if self._is_argument and value.is_container else []

    def _take(self, value: JsonValue) -> list[Piece]:
        """Use a key or a value that is complete; containers have been used as they came."""
        if self._place is _Place.KEY:
            self._key = value.text()
            self._place = _Place.COLON
            return []
        self._place = _Place.COMMA
        is_argument, self._is_argument = self._is_argument, False
        if is_argument and not value.is_container:
            return self._argue("{}" if value.text() == "null" else value.text())
        if self._key in NAME_KEYS and value.is_string and not self.has_started:
            return self._start(value.text())
        return []

    def _start(self, name: str) -> list[Piece]:
        if name not in self._names:
            return self._end()
        self.has_started = True
        held, self._held = self._held, ""
        return [CallStart(name), CallArguments(held)] if held else [CallStart(name)]

    def _argue(self, text: str) -> list[Piece]:
        self._has_arguments = True
        if self.has_started:
            return [CallArguments(text)]
        self._held += text
        return []

    def _end(self) -> list[Piece]:
        self.is_over = True
        self.is_refused = not self.has_started
        return [] if self.is_refused or self._has_arguments else [CallArguments("{}")]


class CallRun:
    """Reads calls one after the other, as a list or not, up to `closing` ("" for the end of the text).

    `is_broken` is set by what is neither a call nor between calls, and where none came before `closing`;
    `leftover` is the text since the last call, for the reader to give out as content.
    """

    def __init__(self, names: frozenset[str], closing: str = "") -> None:
        self._names = names
        self._closing = closing
        self._num_closing = 0
        self._call: CallObject | None = None
        self.leftover = ""
        self.has_calls = False
        self.is_closed = False
        self.is_broken = False

    def feed(self, char: str) -> list[Piece]:
        self.leftover += char
        if self._call is None:
            self._feed_between(char)
            return []
        return self._feed_call(self._call, char)

    def _feed_call(self, call: CallObject, char: str) -> list[Piece]:
        pieces = call.feed(char)
        if call.has_started:
            self.has_calls = True
            self.leftover = ""
        if call.is_over:
            self._call = None
            self.is_broken = call.is_refused
            if call.is_broken and not call.is_refused:
                self.leftover = char
                self._feed_between(char)
        return pieces

    def _feed_between(self, char: str) -> None:
        if self._num_closing or char == self._closing[:1]:
            self._feed_closing(char)
        elif char == "{":
            self._call = CallObject(self._names)
            self._call.feed(char)
        else:
            self.is_broken = char not in BETWEEN_CALLS

    def _feed_closing(self, char: str) -> None:
        self.is_broken = char != self._closing[self._num_closing]
        self._num_closing += 1
        if self.is_broken or self._num_closing < len(self._closing):
            return
        # SmolLM2 writes an empty list where it calls nothing.
        is_empty_list = "".join(self.leftover.split()) == f"[]{self._closing}"
        self.is_closed = self.has_calls or is_empty_list
        self.is_broken = not self.is_closed
