"""The end of one JSON value in a text that arrives character by character.

What the value means is left to its reader; nesting and strings are all that is looked at.
"""

import json

_OPENING = "{["
_CLOSING = "}]"


class JsonValue:
    """One value, made with its first character. Of containers no text is kept."""

    def __init__(self, char: str) -> None:
        self.is_string = char == '"'
        self.is_container = char in _OPENING
        self.is_over = False
        self._depth = int(self.is_container)
        self._is_quoted = self.is_string
        self._is_escaped = False
        self._text = [char]

    @staticmethod
    def can_begin(char: str) -> bool:
        return char in '{["-0123456789tfn'

    def feed(self, char: str) -> bool:
        """Return whether `char` belongs to the value; it does not where a number or word ends before it."""
        if not self.is_container:
            if not self.is_string and (char in ",}]<" or char.isspace()):
                self.is_over = True
                return False
            self._text.append(char)
        if self._is_quoted:
            self._feed_quoted(char)
        elif self.is_container and char == '"':
            self._is_quoted = True
        elif self.is_container:
            self._depth += (char in _OPENING) - (char in _CLOSING)
            self.is_over = self._depth == 0
        return True

    def _feed_quoted(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_quoted = False
            self.is_over = self.is_string

    def text(self) -> str:
        """Return a complete number or word as written, and what a complete string says."""
        assert not self.is_container, "the text of a container is not kept"
        text = "".join(self._text)
        if not self.is_string:
            return text
        try:
            value: str = json.loads(text, strict=False)
            value.encode()
        except ValueError:
            return text[1:-1]  # broken escapes and halves of surrogate pairs: as it is written
        return value
