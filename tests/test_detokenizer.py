"""Laws of the incremental detokenizer: joined deltas equal the whole decode, and no delta splits a character.

The tokenizers are trained here on a few lines; a real vocabulary is left to the end-to-end tests.
"""

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.detokenizer import MAX_WINDOW, IncrementalDetokenizer

END = "<|end|>"
TEXTS = (
    "Hello world, it's a fine day.",
    'He said "no" — then "yes".',
    "  leading  spaces\n\tand tabs \n\n",
    "日本語のテキスト、混ざった ASCII。",
    "🦅 eaglet 👩‍👩‍👧 family 🏴󠁧󠁢󠁥󠁮󠁧󠁿 flag",
    "naïve café a\u0301 z\u0335",
    "a real \ufffd replacement",
    "\ufffd",
    "",
)


def byte_level(num_merges: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + num_merges,
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """A SentencePiece-like vocabulary: words with a leading mark, bytes for what is not in it."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁world", "日", "▁it"]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: idx for idx, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


PURE_BYTES = byte_level(0)
MERGED = byte_level(200)


def stream(detokenizer: IncrementalDetokenizer, runs: Sequence[Sequence[int]]) -> list[str]:
    return [detokenizer.append(run) for run in runs] + [detokenizer.flush()]


def cut_at_random(token_ids: Sequence[int], rng: random.Random) -> list[Sequence[int]]:
    bounds = sorted(
        {0, len(token_ids), *(rng.randint(0, len(token_ids)) for _ in range(len(token_ids) // 3))}
    )
    return [token_ids[start:end] for start, end in itertools.pairwise(bounds)]


@pytest.mark.parametrize("tokenizer", [PURE_BYTES, MERGED], ids=["bytes", "merged"])
@pytest.mark.parametrize("text", TEXTS)
def test_joined_deltas_equal_the_text_for_runs_of_any_size(tokenizer, text):
    token_ids = tokenizer.encode(text).ids
    for size in range(1, 9):
        runs = [token_ids[start : start + size] for start in range(0, len(token_ids), size)]
        assert "".join(stream(IncrementalDetokenizer(tokenizer, ()), runs)) == text


def test_deltas_of_all_ways_to_cut_an_answer_are_equal_and_whole():
    token_ids = PURE_BYTES.encode('é"🦅').ids
    for cuts in itertools.product([False, True], repeat=len(token_ids) - 1):
        bounds = [0, *(idx for idx, is_cut in enumerate(cuts, start=1) if is_cut), len(token_ids)]
        runs = [token_ids[start:end] for start, end in itertools.pairwise(bounds)]
        deltas = stream(IncrementalDetokenizer(PURE_BYTES, ()), runs)
        assert "".join(deltas) == 'é"🦅'
        assert all("\ufffd" not in delta for delta in deltas)


@given(st.data())
def test_joined_deltas_equal_the_whole_decode_for_arbitrary_tokens(data):
    token_ids = data.draw(st.lists(st.integers(0, MERGED.get_vocab_size() - 1), max_size=40))
    skips = data.draw(st.booleans())
    runs = cut_at_random(token_ids, random.Random(data.draw(st.integers(0, 99))))
    detokenizer = IncrementalDetokenizer(MERGED, (), skip_special_tokens=skips)
    assert "".join(stream(detokenizer, runs)) == MERGED.decode(token_ids, skip_special_tokens=skips)


@given(st.lists(st.sampled_from([0x80, 0xBF, 0xC3, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0xA6, 0x41]), max_size=300))
def test_broken_byte_sequences_of_any_length_keep_the_law(raw):
    token_ids = byte_ids(PURE_BYTES, bytes(raw))
    deltas = stream(IncrementalDetokenizer(PURE_BYTES, ()), [token_ids[:7], token_ids[7:]])
    assert "".join(deltas) == PURE_BYTES.decode(token_ids)


@given(st.text(max_size=12), st.text(max_size=12))
def test_deltas_continue_the_prompt(prompt, answer):
    prompt_ids, answer_ids = MERGED.encode(prompt).ids, MERGED.encode(answer).ids
    deltas = stream(IncrementalDetokenizer(MERGED, prompt_ids), [answer_ids])
    assert "".join(deltas) == answer


def test_the_answer_owns_a_character_that_the_prompt_left_unfinished():
    raw = "🦅!".encode()
    prompt_ids, answer_ids = byte_ids(PURE_BYTES, b"x" + raw[:2]), byte_ids(PURE_BYTES, raw[2:])
    assert stream(IncrementalDetokenizer(PURE_BYTES, prompt_ids), [answer_ids]) == ["🦅!", ""]


def test_broken_bytes_of_the_prompt_stay_with_the_prompt():
    prompt_ids = byte_ids(PURE_BYTES, b"x\xf0\x9f")
    assert stream(IncrementalDetokenizer(PURE_BYTES, prompt_ids), [byte_ids(PURE_BYTES, b"yz")]) == ["yz", ""]
    assert stream(IncrementalDetokenizer(PURE_BYTES, prompt_ids), []) == [""]


def test_special_token_inside_a_character_is_skipped():
    end = MERGED.token_to_id(END)
    raw = byte_ids(MERGED, "é".encode())
    detokenizer = IncrementalDetokenizer(MERGED, (end,))
    assert stream(detokenizer, [[raw[0], end], [raw[1], end]]) == ["", "é", ""]


def test_special_token_is_text_unless_skipped():
    token_ids = [*MERGED.encode("a").ids, MERGED.token_to_id(END)]
    assert "".join(stream(IncrementalDetokenizer(MERGED, (), False), [token_ids])) == "a" + END
    assert "".join(stream(IncrementalDetokenizer(MERGED, (), True), [token_ids])) == "a"


@pytest.mark.parametrize("words", [["▁Hello"], ["▁", "▁world"], ["日", "<0xE4>", "<0xBD>", "<0xA0>", "▁it"]])
def test_a_decoder_that_strips_the_first_space_continues_the_prompt(words):
    tokenizer = byte_fallback()
    prompt_ids, answer_ids = (
        [tokenizer.token_to_id("▁Hello")],
        [tokenizer.token_to_id(word) for word in words],
    )
    for size in (1, 2, 5):
        runs = [answer_ids[start : start + size] for start in range(0, len(answer_ids), size)]
        deltas = stream(IncrementalDetokenizer(tokenizer, prompt_ids), runs)
        assert "Hello" + "".join(deltas) == tokenizer.decode(prompt_ids + answer_ids)
        assert "\ufffd" not in "".join(deltas)


def test_unfinished_character_at_the_end_comes_out_by_flush():
    token_ids = byte_ids(PURE_BYTES, b"ok\xf0\x9f")
    detokenizer = IncrementalDetokenizer(PURE_BYTES, ())
    assert detokenizer.append(token_ids) == "ok"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
    assert list(detokenizer.text_lens) == [1, 2, 2, 3]


def test_text_length_maps_back_to_the_token_that_brought_it():
    token_ids = byte_ids(PURE_BYTES, "aé🦅b".encode())
    detokenizer = IncrementalDetokenizer(PURE_BYTES, ())
    detokenizer.append(token_ids)
    assert list(detokenizer.text_lens) == [1, 1, 2, 2, 2, 2, 3, 4]
    assert [detokenizer.num_tokens_for(text_len) for text_len in range(5)] == [0, 1, 3, 7, 8]


@pytest.mark.parametrize("raw", [b"word ", "日本".encode(), b"\xf0", b"\x80\x80\xe4"])
def test_decoding_cost_per_token_does_not_grow_with_the_answer(raw):
    class Counting:
        num_decoded = 0

        def decode(self, ids, skip_special_tokens=True):
            self.num_decoded += len(ids)
            return PURE_BYTES.decode(ids, skip_special_tokens=skip_special_tokens)

    counting = Counting()
    detokenizer = IncrementalDetokenizer(counting, ())
    costs = []
    for _ in range(4):
        before = counting.num_decoded
        detokenizer.append(byte_ids(PURE_BYTES, raw * 200))
        costs.append(counting.num_decoded - before)
    assert max(costs[1:]) <= 2 * min(costs[1:])
    assert max(costs) <= 200 * len(raw) * (MAX_WINDOW + 1)


def byte_ids(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    """Ids of single bytes, which byte-level BPE writes as the characters of this table."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {byte: chr(byte) for byte in printable} | {
        byte: chr(0x100 + idx) for idx, byte in enumerate(others)
    }
    return [tokenizer.token_to_id(chars[byte]) for byte in raw]
