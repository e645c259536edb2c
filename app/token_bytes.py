"""The bytes that single tokens stand for, read from how a tokenizer decodes.

A token may hold part of a character, which decoding it alone cannot show.
"""

import json
import re

import tokenizers

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte that the vocabulary has no piece for
_SPACE = "\u2581"  # how SentencePiece writes a space


class TokenBytes:
    """Bytes by token id. Joined, those of an answer are its text's, special tokens written out; a leading
    space that decoding strips from a text is there.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {
            token_id: token.content.encode()
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        decoder = json.loads(tokenizer.to_str())["decoder"] or {}
        kinds = {step["type"] for step in (decoder, *decoder.get("decoders", ()))} if decoder else set()
        self._is_byte_level = "ByteLevel" in kinds
        self._is_sentence_piece = not kinds.isdisjoint({"ByteFallback", "Metaspace"})
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """Return the bytes of a token; none for an id beyond the vocabulary (a padded row of the head)."""
        if token_id not in self._known:
            self._known[token_id] = self._read(token_id)
        return self._known[token_id]

    def _read(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._is_byte_level and all(char in _BYTES for char in piece):
            return bytes(_BYTES[char] for char in piece)
        if self._is_sentence_piece:
            byte = _BYTE_PIECE.fullmatch(piece)
            return bytes.fromhex(byte[1]) if byte else piece.replace(_SPACE, " ").encode()
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Bytes that print stand for themselves, the others for the characters from 256 on, in order.
    """
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    hidden = sorted(set(range(256)) - set(shown))
    return {chr(byte): byte for byte in shown} | {chr(256 + idx): byte for idx, byte in enumerate(hidden)}


_BYTES = _byte_alphabet()
