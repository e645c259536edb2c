"""The bytes of every token of a model, read from its tokenizer file.

What a grammar makes of them is left to the grammar library.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelLoadError

_SPACE = "\u2581"  # SentencePiece's sign for a space


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """Which model a vocabulary is of."""

    folder: Path
    vocab_size: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token t has the bytes `tokens[t]`; those of special and of unused tokens are empty, since no text of an
    answer may hold them. `digest` names the file.
    """

    tokens: tuple[bytes, ...]
    eos_token_ids: tuple[int, ...]
    digest: str

    @staticmethod
    def load(model: ModelTokens) -> "Vocabulary":
        """Read `tokenizer.json` of a model folder. Raises `ModelLoadError` for one that is not understood."""
        path, vocab_size = model.folder / "tokenizer.json", model.vocab_size
        try:
            content = path.read_bytes()
            file: dict[str, Any] = json.loads(content)
            pieces: dict[str, int] = file["model"]["vocab"]
            decode = byte_level_bytes if _is_byte_level(file) else byte_fallback_bytes
            tokens = [b""] * vocab_size
            for piece, token_id in pieces.items():
                if token_id < vocab_size:
                    tokens[token_id] = decode(piece)
            for added in file.get("added_tokens", ()):
                if added["id"] < vocab_size:
                    tokens[added["id"]] = b"" if added["special"] else added["content"].encode()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelLoadError(f"{path} must be the file of a byte-level or byte-fallback BPE") from error
        digest = hashlib.sha256(content).hexdigest()[:16]
        return Vocabulary(tuple(tokens), model.eos_token_ids, digest)


def _is_byte_level(file: dict[str, Any]) -> bool:
    """Return whether pieces are written in the byte-level alphabet, as their decoder says."""
    decoder = file["decoder"] or {}
    steps = [decoder, *decoder.get("decoders", ())]
    return any(step.get("type") == "ByteLevel" for step in steps)


def byte_fallback_bytes(piece: str) -> bytes:
    """Return the bytes of a piece of SentencePiece: `<0x0A>` is one byte."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(_SPACE, " ").encode()


def byte_level_bytes(piece: str) -> bytes:
    """Return the bytes of a piece in the byte-level alphabet of GPT-2, where each character is a byte."""
    return bytes([_BYTES[char] for char in piece])


def _alphabet() -> dict[str, int]:
    """Return the byte of each character: itself where it prints, else the next one from 256 on."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    shifted = {chr(256 + idx): byte for idx, byte in enumerate(others)}
    return {chr(byte): byte for byte in printing} | shifted


_BYTES = _alphabet()
