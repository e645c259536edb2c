"""The warped logits against the formulas of each parameter."""

import dataclasses
import math

import pytest
import torch

from engine.sampling.warp import warp
from tests.sampling.cases import sampling_tensors

VOCAB = 12
ZERO = torch.zeros(2, dtype=torch.int64)


def random_logits() -> torch.Tensor:
    return torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(3)) * 2


def test_nothing_asked_gives_the_logits_in_float32() -> None:
    whole = random_logits().bfloat16().repeat(1, 2)
    strided = whole[:, ::2]
    sampling = sampling_tensors(2, VOCAB, temperature=1.0)
    warped = warp(strided, sampling, sampling.output_counts, ZERO)
    assert warped.dtype == torch.float32
    assert torch.equal(warped, strided.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_arguments_are_left_unchanged(dtype: torch.dtype) -> None:
    logits = random_logits().to(dtype)
    sampling = sampling_tensors(
        2,
        VOCAB,
        temperature=1.0,
        top_p=0.5,
        frequency_penalty=1.0,
        bias=((1, 5.0),),
        stop_token_ids=(2,),
        stop_from=9,
    )
    counts = torch.ones(2, VOCAB, dtype=torch.int32)
    before = logits.clone()
    warp(logits, sampling, counts, ZERO)
    assert torch.equal(logits, before)
    assert (counts == 1).all()


def test_bias_is_added_and_its_padding_is_harmless() -> None:
    logits = random_logits()
    sampling = sampling_tensors(2, VOCAB, bias=((4, -100.0), (7, 2.5), (0, 0.0), (0, 0.0)))
    warped = warp(logits, sampling, sampling.output_counts, ZERO)
    expected = logits.clone()
    expected[:, 4] -= 100
    expected[:, 7] += 2.5
    assert torch.equal(warped, expected)


@pytest.mark.parametrize(
    ("repetition", "presence", "frequency"),
    [(1.7, 0.0, 0.0), (1.0, 1.5, 0.0), (1.0, 0.0, -0.7), (0.5, -1.0, 2.0)],
)
def test_penalties_follow_their_formulas(repetition: float, presence: float, frequency: float) -> None:
    logits = random_logits()
    prompt = torch.zeros(2, VOCAB, dtype=torch.bool)
    prompt[:, [0, 1]] = True
    counts = torch.zeros(2, VOCAB, dtype=torch.int32)
    counts[0, 1], counts[0, 2], counts[1, 5] = 1, 3, 2
    sampling = sampling_tensors(
        2,
        VOCAB,
        repetition_penalty=[repetition, 1.0],
        presence_penalty=[presence, 0.0],
        frequency_penalty=[frequency, 0.0],
        prompt=prompt,
    )
    warped = warp(logits, sampling, counts, ZERO)
    for token in range(VOCAB):
        value, count = float(logits[0, token]), int(counts[0, token])
        if count or prompt[0, token]:
            value = value / repetition if value > 0 else value * repetition
        value -= presence * (count > 0) + frequency * count
        assert float(warped[0, token]) == pytest.approx(value, abs=1e-5)
    # The second row asks for nothing: not one bit of it moves.
    assert torch.equal(warped[1], logits[1])


def test_bias_comes_before_the_repetition_penalty() -> None:
    logits = torch.full((2, VOCAB), -1.0)
    prompt = torch.ones(2, VOCAB, dtype=torch.bool)
    sampling = sampling_tensors(2, VOCAB, repetition_penalty=2.0, bias=((3, 5.0),), prompt=prompt)
    warped = warp(logits, sampling, sampling.output_counts, ZERO)
    assert warped[0, 3] == (-1 + 5) / 2
    assert warped[0, 4] == -2


def test_stop_tokens_are_masked_before_their_position_only() -> None:
    logits = random_logits()
    sampling = sampling_tensors(2, VOCAB, stop_token_ids=(3, VOCAB - 1, -1), stop_from=[10, 11])
    warped = warp(logits, sampling, sampling.output_counts, torch.tensor([10, 10]))
    assert torch.equal(warped[0], logits[0])
    expected = logits[1].clone()
    expected[[3, VOCAB - 1]] = -math.inf
    assert torch.equal(warped[1], expected)


def test_truncation_reads_penalised_logits() -> None:
    logits = torch.tensor([[5.0, 4.0] + [0.0] * (VOCAB - 2)]).repeat(2, 1)
    counts = torch.zeros(2, VOCAB, dtype=torch.int32)
    counts[0, 0] = 1
    sampling = sampling_tensors(2, VOCAB, temperature=1.0, top_k=1, presence_penalty=2.0)
    warped = warp(logits, sampling, counts, ZERO)
    assert warped.isfinite().nonzero().tolist() == [[0, 1], [1, 0]]
    assert warped[0, 1] == 4


@pytest.mark.parametrize("fault", [float("nan"), -float("nan")])
def test_nan_stays_visible_through_every_step(fault: float) -> None:
    logits = random_logits()
    logits[0, 5] = fault
    sampling = sampling_tensors(
        2,
        VOCAB,
        temperature=1.0,
        top_k=2,
        top_p=0.5,
        min_p=0.2,
        repetition_penalty=1.3,
        bias=((1, 5.0),),
        stop_token_ids=(2,),
        stop_from=9,
    )
    warped = warp(logits, sampling, torch.ones(2, VOCAB, dtype=torch.int32), ZERO)
    assert warped[0].amax().isnan()
    assert warped[1].amax().isfinite()


def test_flags_off_skip_their_work() -> None:
    sampling = sampling_tensors(
        2,
        VOCAB,
        temperature=1.0,
        top_k=1,
        repetition_penalty=2.0,
        bias=((1, 5.0),),
        stop_token_ids=(2,),
        stop_from=9,
    )
    off = dataclasses.replace(
        sampling, is_truncated=False, is_penalized=False, is_biased=False, has_min_tokens=False
    )
    logits = random_logits()
    assert torch.equal(warp(logits, off, off.output_counts, ZERO), logits)
