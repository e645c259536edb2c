"""A model's tokenizer: text to token ids and back.

Chat templates are left to `chat`, growing answers to the engine's `IncrementalDetokenizer`.
"""

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from app.token_bytes import TokenBytes
from engine import ModelLoadError


class Tokenizer:
    """The `tokenizer.json` of a model folder. Raises `ModelLoadError` where it is missing or corrupt."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelLoadError(f"a model folder needs a tokenizer.json, found none in {folder}")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ModelLoadError(f"cannot read {path}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.token_bytes = TokenBytes(self._tokenizer)

    def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        """Return the token ids of `text`; special tokens written in it are read as such."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. An id beyond the vocabulary (a padded row of the head) has no text."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return the vocabulary's spelling of one token, which need not be valid text; "" beyond it."""
        return self._tokenizer.id_to_token(token_id) or ""

    def is_special(self, text: str) -> bool:
        """Whether `text` is one token that decoding leaves out as a special one."""
        tokens = self._tokenizer.get_added_tokens_decoder().values()
        return any(token.content == text and token.special for token in tokens)
