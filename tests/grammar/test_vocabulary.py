"""The bytes of a vocabulary are those that its tokens stand for in a text."""

import json

import pytest
import tokenizers

from engine.errors import ModelLoadError
from engine.grammar.vocabulary import ModelTokens, Vocabulary, byte_fallback_bytes, byte_level_bytes
from tests.app.harness import write_model


def test_the_byte_level_alphabet_is_that_of_the_library():
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    assert sorted(byte_level_bytes(char) for char in alphabet) == [bytes([byte]) for byte in range(256)]
    encode = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in ("Hello world\n\t", "Grüße, 世界 🦅", "\x00\x7f\xa0\xad"):
        ((piece, _),) = encode.pre_tokenize_str(text)
        assert byte_level_bytes(piece) == text.encode()


@pytest.mark.parametrize(
    ("piece", "expected"),
    [("▁the", b" the"), ("<0x0A>", b"\n"), ("<0xE2>", b"\xe2"), ("é", "é".encode()), ("<0x0A", b"<0x0A")],
)
def test_pieces_with_byte_fallback(piece, expected):
    assert byte_fallback_bytes(piece) == expected


def test_special_and_unused_tokens_have_no_bytes(tmp_path):
    write_model(tmp_path)
    vocabulary = Vocabulary.load(ModelTokens(tmp_path, 260, (1,)))
    assert vocabulary.tokens[:2] == vocabulary.tokens[258:] == (b"", b"")
    assert sorted(vocabulary.tokens[2:258]) == [bytes([byte]) for byte in range(256)]
    assert len(Vocabulary.load(ModelTokens(tmp_path, 100, (1,))).tokens) == 100


def test_a_token_added_by_hand_stands_for_its_text(tmp_path):
    write_model(tmp_path)
    path = tmp_path / "tokenizer.json"
    file = json.loads(path.read_text())
    digest = Vocabulary.load(ModelTokens(tmp_path, 260, (1,))).digest
    file["added_tokens"].append({"id": 258, "content": "<tool call>", "special": False})
    path.write_text(json.dumps(file))
    vocabulary = Vocabulary.load(ModelTokens(tmp_path, 260, (1,)))
    assert vocabulary.tokens[258] == b"<tool call>"
    assert vocabulary.digest != digest


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"model": {"vocab": {"世": 0}}, "decoder": null}', None]
)
def test_a_file_that_is_not_understood_is_a_load_error(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    is_understood = content is not None and "世" in content  # no decoder: its pieces are texts
    if is_understood:
        assert Vocabulary.load(ModelTokens(tmp_path, 1, (0,))).tokens == ("世".encode(),)
    else:
        with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
            Vocabulary.load(ModelTokens(tmp_path, 1, (0,)))
