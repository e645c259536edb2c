"""Turns the tokens of one growing answer into text, a run of several tokens at a time.

It owns no vocabulary and no stop rule: the tokenizer is passed in, and stop strings are left to
`stop_strings`.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Protocol

NUM_CONTEXT_TOKENS = (
    8  # of the prompt: enough for a decoder that looks back at the previous word or character
)
MAX_WINDOW = 64  # tokens decoded at once where none ends a character; real text never comes near it
REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not (yet) a character
MAX_SPLIT_PIECES = 3  # an unfinished UTF-8 character has at most 3 bytes, each at most one replacement
MAX_HELD = 8  # more replacements in a row than this are text of their own, not one unfinished character


class TokenDecoder(Protocol):
    """Whatever can turn token ids into text: a `tokenizers.Tokenizer`, or a `transformers` tokenizer."""

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool = True) -> str: ...


class IncrementalDetokenizer:
    """The text of one answer, growing by runs of tokens.

    Laws: joined, the deltas do not depend on how the tokens were cut into runs; with the prompt's text before
    them they are `decode(prompt + output)`, which for byte-level BPE makes them `decode(output)`; no delta
    but the last (`flush`) ends inside a character. A character that the prompt left unfinished belongs to
    the answer that finishes it. A token costs two decodes of the tokens since the last but one whole
    character, never of the whole answer.
    """

    def __init__(
        self, tokenizer: TokenDecoder, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # The window is all that is ever decoded: a context whose text is out already, then newer tokens.
        self._window: list[int] = []
        self._context_len = 0
        self._context_text_len = 0
        self._num_out = 0  # characters of the window's text that are out, or are the prompt's
        self._text_len = 0
        self._text_lens: list[int] = []
        self._prompt_text = ""
        for token_id in prompt_token_ids[-NUM_CONTEXT_TOKENS:]:
            self._advance(token_id)
        self._prompt_text = self._decode(self._window)

    @property
    def text_lens(self) -> Sequence[int]:
        """Characters of the answer that were out after each token."""
        return self._text_lens

    def append(self, token_ids: Iterable[int]) -> str:
        """Take the next tokens and return the text that they settle, which may be empty."""
        deltas = []
        for token_id in token_ids:
            delta = self._advance(token_id)
            self._text_len += len(delta)
            self._text_lens.append(self._text_len)
            deltas.append(delta)
        return "".join(deltas)

    def flush(self) -> str:
        """End the answer: return what was held back, an unfinished character as replacement characters."""
        text = self._decode(self._window)
        delta = self._take(text, len(text))
        self._text_len += len(delta)
        if delta and self._text_lens:
            self._text_lens[-1] = self._text_len
        return delta

    def num_tokens_for(self, text_len: int) -> int:
        """Return how many tokens the first `text_len` characters of the answer took; no text took none.

        Only text that is out can be asked for.
        """
        assert 0 <= text_len <= self._text_len, (text_len, self._text_len)
        return bisect_left(self._text_lens, text_len) + 1 if text_len else 0

    def _advance(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        settled_len = _settled_len(text)
        delta = self._take(text, settled_len)
        if settled_len == len(text):
            self._slide(text)
        elif len(self._window) > MAX_WINDOW:
            self._shorten(text)
        return delta

    def _take(self, text: str, end: int) -> str:
        """Return what `text[:end]` adds to what is out already."""
        if end <= self._num_out:
            return ""
        start = self._num_out
        if self._prompt_text and text.startswith(self._prompt_text):
            # A replacement that stays one was the prompt's own; one that changed is finished by the answer.
            start = len(self._prompt_text)
        self._prompt_text = ""
        self._num_out = max(start, end)
        return text[start:end]

    def _slide(self, text: str) -> None:
        """Make what came since the last whole character the new context, as the window ends with one now."""
        if len(text) == self._context_text_len:  # only tokens without text (skipped ones): look further back
            self._window = self._window[: self._context_len]
            return
        self._window = self._window[self._context_len :]
        self._context_len = len(self._window)
        self._context_text_len = self._num_out = len(self._decode(self._window))

    def _shorten(self, text: str) -> None:
        """Keep the newer half of a window that ends in no character, and the count of what is not out."""
        num_held = len(text) - self._num_out
        self._window = self._window[-MAX_WINDOW // 2 :]
        self._num_out = max(0, len(self._decode(self._window)) - num_held)
        self._context_len = self._context_text_len = 0

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def _settled_len(text: str) -> int:
    """Count the characters of `text` that no later token changes: all before trailing replacements."""
    num_held = len(text) - len(text.rstrip(REPLACEMENT))
    return len(text) - (MAX_SPLIT_PIECES if num_held > MAX_HELD else num_held)
