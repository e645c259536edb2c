"""Runs of tokens become the text that one token after the other becomes, and each token's place in it is
known.
"""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from app.run_detokenizer import RunDetokenizer
from engine import IncrementalDetokenizer

END = "<|end|>"


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: idx for idx, char in enumerate(alphabet)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁world", "日", "▁it"]
    vocabulary = {piece: idx for idx, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return tokenizer


TOKENIZERS = {"bytes": byte_level(), "fallback": byte_fallback()}


class Counting:
    """A decoder that counts its calls."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.num_calls = 0
        self._tokenizer = tokenizer

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.num_calls += 1
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_runs_say_what_single_tokens_say(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    # Few kinds of tokens, so that whole characters, broken ones and special tokens often stand side by side.
    kinds = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), min_size=1, max_size=6))
    if name == "bytes":
        kinds += [tokenizer.token_to_id(END), *tokenizer_ids(tokenizer, "é🦅a")]
    tokens = st.lists(st.sampled_from(kinds), max_size=8)
    prompt, runs = data.draw(tokens), data.draw(st.lists(tokens, max_size=7))
    skips = data.draw(st.booleans())
    fast, exact = (kind(tokenizer, prompt, skips) for kind in (RunDetokenizer, IncrementalDetokenizer))
    assert [fast.append(run) for run in runs] == [exact.append(run) for run in runs]
    assert fast.flush() == exact.flush()
    assert fast.text_lens == exact.text_lens


def tokenizer_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    alphabet = {byte: char for char, byte in zip(*byte_alphabet(), strict=True)}
    return [tokenizer.token_to_id(alphabet[byte]) for byte in text.encode()]


def byte_alphabet() -> tuple[list[str], list[int]]:
    """Return the characters that stand for bytes, and the bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return [*map(chr, plain), *(chr(256 + idx) for idx in range(len(rest)))], plain + rest


def test_bytes_that_are_broken_only_behind_what_came_long_ago_stay_broken() -> None:
    tokenizer = TOKENIZERS["fallback"]
    broken, plain = (tokenizer.token_to_id(piece) for piece in ("<0x80>", "<0x41>"))
    fast, exact = (kind(tokenizer, [broken, plain]) for kind in (RunDetokenizer, IncrementalDetokenizer))
    runs = [[plain] * 7, [plain], [plain]]
    assert [fast.append(run) for run in runs] == [exact.append(run) for run in runs]
    assert fast.flush() == exact.flush() == "\ufffd" * 3


def test_a_run_behind_nothing_but_special_tokens_goes_on_with_the_text() -> None:
    tokenizer = TOKENIZERS["fallback"]
    hello, end, it = (tokenizer.token_to_id(piece) for piece in ("▁Hello", END, "▁it"))
    detokenizer = RunDetokenizer(tokenizer, [hello, *[end] * 7])
    assert [detokenizer.append(run) for run in ([end], [it], [it, it])] == ["", " it", " it it"]


def test_places_are_told_in_the_middle_of_an_answer_and_after_it() -> None:
    tokenizer = TOKENIZERS["bytes"]
    detokenizer = RunDetokenizer(tokenizer, tokenizer_ids(tokenizer, "x"))
    assert detokenizer.append(tokenizer_ids(tokenizer, "ab")) == "ab"
    assert detokenizer.num_tokens_for(1) == 1
    assert detokenizer.append(tokenizer_ids(tokenizer, "é🦅c")) == "é🦅c"
    assert [detokenizer.num_tokens_for(text_len) for text_len in range(6)] == [0, 1, 2, 4, 8, 9]


def test_plain_text_costs_two_decodes_a_run() -> None:
    counting = Counting(TOKENIZERS["bytes"])
    prompt = tokenizer_ids(TOKENIZERS["bytes"], "question")
    detokenizer = RunDetokenizer(counting, prompt)  # type: ignore[arg-type]
    before = counting.num_calls
    for text in itertools.repeat("some words of an answer", 10):
        detokenizer.append(tokenizer_ids(TOKENIZERS["bytes"], text))
    assert counting.num_calls - before == 20
