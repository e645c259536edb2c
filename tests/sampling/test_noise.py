"""Philox against its published vectors, and the laws of the noise made from it."""

import pytest
import torch
from scipy import stats
from torch import Tensor

from engine.sampling import noise
from engine.sampling.noise import Stream, gumbel, philox, uniform

WORD = 2**32


def python_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 with Python's integers, after the paper's figure."""
    c, k = list(counter), list(key)
    for _ in range(10):
        left, right = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [right // WORD ^ c[1] ^ k[0], right % WORD, left // WORD ^ c[3] ^ k[1], left % WORD]
        k = [(k[0] + 0x9E3779B9) % WORD, (k[1] + 0xBB67AE85) % WORD]
    return c


def tensor_philox(counter: list[int], key: list[int]) -> list[int]:
    words = [torch.tensor([word]) for word in (*counter, *key)]
    return [int(word) for word in philox((words[0], words[1], words[2], words[3]), (words[4], words[5]))]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([WORD - 1] * 4, [WORD - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_words(counter: list[int], key: list[int], expected: list[int]) -> None:
    assert tensor_philox(counter, key) == expected
    assert python_philox(counter, key) == expected


def test_philox_equals_python_integers_and_leaves_its_arguments() -> None:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, WORD, (6, 500), generator=generator)
    before = words.clone()
    answer = torch.stack(philox((words[0], words[1], words[2], words[3]), (words[4], words[5])))
    assert torch.equal(words, before)
    for column in range(words.shape[1]):
        c0, c1, c2, c3, k0, k1 = words[:, column].tolist()
        assert answer[:, column].tolist() == python_philox([c0, c1, c2, c3], [k0, k1])


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 5, 4097])
def test_noise_of_a_token_does_not_depend_on_vocabulary_or_batch(vocab_size: int) -> None:
    seed, position = torch.tensor([-1, 2**40, 7]), torch.tensor([0, 12, 2**33])
    batch = gumbel(seed, position, 6000, Stream.TARGET)
    for row in range(3):
        alone = gumbel(seed[row : row + 1], position[row : row + 1], vocab_size, Stream.TARGET)
        assert torch.equal(alone[0], batch[row, :vocab_size])


def test_every_part_of_the_key_changes_the_noise() -> None:
    keys = [(5, 9, 0), (6, 9, 0), (5 + WORD, 9, 0), (5 - 2**63, 9, 0), (5, 10, 0), (5, 9 + WORD, 0)]
    keys += [(5, 9, 1), (5, 9, 2), (9, 5, 0)]
    rows = [gumbel(torch.tensor([s]), torch.tensor([p]), 64, Stream(stream))[0] for s, p, stream in keys]
    values = torch.cat(rows)
    assert values.unique().numel() == values.numel()


def test_gumbel_and_uniform_have_their_laws() -> None:
    seed, position = torch.arange(50), torch.arange(50) * 3
    draws = gumbel(seed, position, 4000, Stream.TARGET).flatten()
    assert stats.kstest(draws.numpy(), "gumbel_r").pvalue > 1e-3
    assert stats.kstest(draws.numpy(), "gumbel_r", args=(0.02, 1.0)).pvalue < 1e-6
    draws = uniform(seed, position, 4000, Stream.ACCEPT).flatten()
    assert stats.kstest(draws.numpy(), "uniform").pvalue > 1e-3


def test_neighbouring_keys_are_uncorrelated() -> None:
    seed, position = torch.tensor([3, 3, 4, 3]), torch.tensor([8, 9, 8, 8])
    rows = gumbel(seed, position, 100_000, Stream.TARGET)
    rows[3] = gumbel(seed[:1], position[:1], 100_000, Stream.DRAFT)[0]
    correlation = torch.corrcoef(rows).fill_diagonal_(0)
    assert correlation.abs().max() < 5 / 100_000**0.5


def fixed_words(words: list[int]):
    """Return a stand-in for `philox` whose first four words are `words`."""

    def fake(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.full((1, 1), word) for word in words)

    return fake


def test_extreme_words_give_finite_noise_and_leaders_do_not_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    one = torch.tensor([1])
    monkeypatch.setattr(noise, "philox", fixed_words([0, 1, WORD - 2, WORD - 1]))
    extremes = gumbel(one, one, 4, Stream.TARGET)[0]
    assert extremes.isfinite().all()
    assert extremes[0] > extremes[1] > extremes[2] >= extremes[3]
    # Winners of a 128k vocabulary have words near 2**15: 24-bit uniforms would be equal there.
    monkeypatch.setattr(noise, "philox", fixed_words([2**15, 2**15 + 1, 2**15 + 2, 2**15 + 3]))
    leaders = gumbel(one, one, 4, Stream.TARGET)[0]
    assert (leaders.diff() < 0).all()


def test_uniform_reaches_zero_and_stays_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    one = torch.tensor([1])
    monkeypatch.setattr(noise, "philox", fixed_words([0, 1, WORD // 2, WORD - 1]))
    draws = uniform(one, one, 4, Stream.ACCEPT)[0]
    assert draws[0] == 0
    assert draws[1] == 2.0**-32
    assert draws[2] == 0.5
    assert draws[3] < 1
