"""The bytes of tokens, for the kinds of tokenizers that models come with."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from app.token_bytes import TokenBytes
from app.tokenizer import Tokenizer

TEXT = "Hé 🦅, a\tb\nc  d"


def test_byte_level_tokens_join_to_the_bytes_of_the_text(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes[token_id] for token_id in token_ids) == TEXT.encode()


def test_every_byte_has_a_token_of_its_own(tokenizer: Tokenizer) -> None:
    assert sorted(tokenizer.token_bytes[token_id] for token_id in range(2, 258)) == [
        bytes([byte]) for byte in range(256)
    ]


def test_special_tokens_are_written_out(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes[1] == b"<|im_end|>"


def test_an_id_beyond_the_vocabulary_has_no_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes[9999] == b""


def sentence_piece() -> tokenizers.Tokenizer:
    """Return a tokenizer of Llama 2's kind: pieces with a mark for the space, and bytes for the rest."""
    pieces = {"<unk>": 0, "\u2581": 1, "\u2581Hi": 2, "é": 3} | {
        f"<0x{byte:02X}>": 4 + byte for byte in range(256)
    }
    tokenizer = tokenizers.Tokenizer(models.BPE(pieces, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def test_sentence_piece_tokens_keep_their_space_and_bytes() -> None:
    tokenizer = sentence_piece()
    raw = TokenBytes(tokenizer)
    token_ids = [2, 1, 3, *(4 + byte for byte in "🦅".encode())]
    assert b"".join(raw[token_id] for token_id in token_ids) == " Hi é🦅".encode()
    assert tokenizer.decode(token_ids) == "Hi é🦅", "decoding strips the first space only"
    assert raw[4 + 0xF0] == b"\xf0"
    assert raw[260] == b"<s>"


def test_other_tokenizers_spell_a_token_as_they_decode_it() -> None:
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"one": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    assert TokenBytes(tokenizer)[0] == b"one"
