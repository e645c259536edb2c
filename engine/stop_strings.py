"""Finds the first stop string in text that arrives in pieces, and holds back what may become one.

It sees text only: which token a match ends in is left to `IncrementalDetokenizer.num_tokens_for`.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import RequestError

MAX_STOPS = 16
MAX_STOP_LEN = 1000  # characters; the scan keeps a table entry for each


@dataclass(frozen=True, slots=True)
class StopScan:
    """What one piece of text led to: `text` may go out.

    Where a stop string ended in the piece, `matched` is that string and `end` counts the characters of the
    whole answer up to the end of the match; else both are None.
    """

    text: str
    matched: str | None = None
    end: int | None = None


class StopStrings:
    """Scans one growing answer for up to 16 stop strings, in time linear in its length.

    The match that ends first wins, and of those that end together the longest: that is what a reader who
    gets the text character by character would stop at, so the answer does not depend on how it was cut into
    pieces. The answer's text excludes the match unless `include_in_output`. Raises `RequestError` on an
    empty stop string, one too long, or too many.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        if len(stops) > MAX_STOPS:
            raise RequestError(f"stop takes at most {MAX_STOPS} strings, found {len(stops)}", "stop")
        if not all(stops):
            raise RequestError("stop strings must not be empty: leave the empty one out", "stop")
        longest = max(map(len, stops), default=0)
        if longest > MAX_STOP_LEN:
            raise RequestError(
                f"a stop string has at most {MAX_STOP_LEN} characters, found {longest}", "stop"
            )
        self._automaton = _Automaton(stops)
        self._include_in_output = include_in_output
        self._state = 0
        self._held = ""  # the longest end of the text so far that begins a stop string
        self._num_seen = 0
        self._is_over = False

    def feed(self, delta: str) -> StopScan:
        """Take the next piece of the answer; after a match nothing more may be fed."""
        assert not self._is_over, f"text after the end of the answer: {delta!r}"
        buffer = self._held + delta
        for idx, char in enumerate(delta, start=len(self._held)):
            self._state = self._automaton.next_state(self._state, char)
            matched = self._automaton.matches[self._state]
            if matched is not None:
                self._is_over = True
                end = idx + 1
                text = buffer[:end] if self._include_in_output else buffer[: end - len(matched)]
                return StopScan(text, matched, self._num_seen + end - len(self._held))
        self._num_seen += len(delta)
        # With the match in the output, everything up to its end goes out whatever comes: nothing to hold.
        num_held = 0 if self._include_in_output else self._automaton.depths[self._state]
        out_len = len(buffer) - num_held
        self._held = buffer[out_len:]
        return StopScan(buffer[:out_len])

    def flush(self) -> str:
        """End an answer that no stop string ended: return what was held back."""
        assert not self._is_over, "the answer was ended by a stop string or flushed before"
        self._is_over = True
        return self._held


class _Automaton:
    """Aho and Corasick (1975): state s is a prefix of a stop string, the longest that ends the text so far.

    depths[s] is its length; matches[s] the longest stop string that ends it, or None.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._shorter: list[int] = [0]  # of each state: the next longest prefix that also ends the text
        self.depths: list[int] = [0]
        self.matches: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._link()

    def next_state(self, state: int, char: str) -> int:
        """Return the state after one more character; amortised constant time."""
        while state and char not in self._children[state]:
            state = self._shorter[state]
        return self._children[state].get(char, 0)

    def _insert(self, stop: str) -> None:
        state = 0
        for depth, char in enumerate(stop, start=1):
            child = self._children[state].get(char)
            if child is None:
                child = self._children[state][char] = len(self._children)
                self._children.append({})
                self._shorter.append(0)
                self.depths.append(depth)
                self.matches.append(None)
            state = child
        self.matches[state] = stop

    def _link(self) -> None:
        """Set `_shorter` level by level, so that the shorter prefixes of a state are linked before it."""
        queue = deque(self._children[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._children[state].items():
                shorter = self.next_state(self._shorter[state], char)
                self._shorter[child] = shorter
                self.matches[child] = self.matches[child] or self.matches[shorter]
                queue.append(child)
