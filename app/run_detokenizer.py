"""Text of an answer by runs of tokens, at two decodes a run however long it is.

It says what `IncrementalDetokenizer` says, which costs two decodes a token and is asked only where a
character may be unfinished, or where somebody wants to know which token brought which text.
"""

from collections.abc import Sequence

from app.tokenizer import Tokenizer
from engine import IncrementalDetokenizer

NUM_CONTEXT_TOKENS = 8  # before a run: enough for a decoder that looks back at the previous word or character
MAX_SUSPECT = 64  # tokens behind a replacement that are left to the exact one, which looks no further back
REPLACEMENT = "\ufffd"


class RunDetokenizer:
    """The text of one answer. Its laws are those of `IncrementalDetokenizer`."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True
    ) -> None:
        self._exact = IncrementalDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens)
        self._unseen: list[int] = []  # by it, though their text is out
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        self._num_suspect = 0  # tokens to come before which a character may be held back by it
        self._recent = list(prompt_token_ids[-NUM_CONTEXT_TOKENS:])

    @property
    def text_lens(self) -> Sequence[int]:
        """Characters of the answer that were out after each token."""
        self._catch_up()
        return self._exact.text_lens

    def append(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens and return the text that they settle, which may be empty."""
        tokens = [*self._recent, *token_ids]
        before, after = self._decode(self._recent), self._decode(tokens)
        self._recent = tokens[-NUM_CONTEXT_TOKENS:]
        is_whole = REPLACEMENT not in after
        # A run without a text before it may be taken for the beginning of one.
        if is_whole and before and not self._num_suspect and after.startswith(before):
            self._unseen += token_ids
            return after[len(before) :]
        self._num_suspect = max(0, self._num_suspect - len(token_ids)) if is_whole else MAX_SUSPECT
        self._catch_up()
        return self._exact.append(token_ids)

    def flush(self) -> str:
        """End the answer: return what was held back, an unfinished character as replacement characters."""
        if self._unseen:
            return ""
        self._catch_up()
        return self._exact.flush()

    def num_tokens_for(self, text_len: int) -> int:
        """Return how many tokens the first `text_len` characters of the answer took; see
        `IncrementalDetokenizer`.
        """
        self._catch_up()
        return self._exact.num_tokens_for(text_len)

    def _catch_up(self) -> None:
        self._exact.append(self._unseen)
        self._unseen = []

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
