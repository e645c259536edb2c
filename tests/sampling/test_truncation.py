"""The threshold search against a plain sort, on random logits and on ties."""

import pytest
import torch
from torch import Tensor

from engine.sampling.truncation import truncation_mask
from tests.sampling.cases import sampling_tensors, sorted_truncation


def random_logits(kind: str, num_rows: int, vocab_size: int, generator: torch.Generator) -> Tensor:
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    if kind == "ties":
        logits = logits.round()
        # -0.0 and 0.0 are one logit, and a whole row may be one tie.
        logits[logits == 0] *= torch.where(
            torch.rand(int((logits == 0).sum()), generator=generator) < 0.5, 1, -1
        )
        logits[0] = 1.5
    if kind == "masked":
        logits[torch.rand(logits.shape, generator=generator) < 0.4] = -torch.inf
        logits[:, 1] = 0.25
    return logits


@pytest.mark.parametrize("vocab_size", [2, 7, 100, 3000])
@pytest.mark.parametrize("kind", ["random", "ties", "masked"])
def test_kept_tokens_are_those_of_a_sort(kind: str, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    num_rows = 96
    logits = random_logits(kind, num_rows, vocab_size, generator)
    top_k = (torch.randint(0, 4, (num_rows,), generator=generator) ** 3).tolist()
    top_k = [min(k, vocab_size) for k in top_k]
    choices = torch.tensor([1.0, 0.999, 0.9, 0.5, 0.25, 1e-6, 1e-30])
    top_p = choices[torch.randint(0, len(choices), (num_rows,), generator=generator)].tolist()
    min_p = torch.tensor([0.0, 0.0, 0.1, 1.0])[torch.randint(0, 4, (num_rows,), generator=generator)].tolist()
    temperature = torch.tensor([0.1, 1.0, 30.0])[
        torch.randint(0, 3, (num_rows,), generator=generator)
    ].tolist()
    sampling = sampling_tensors(
        num_rows, vocab_size, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    mask = truncation_mask(logits, sampling)
    for row in range(num_rows):
        # A token of probability 0 may be kept or not: it is not drawn.
        expected = sorted_truncation(logits[row], temperature[row], top_k[row], top_p[row], min_p[row])
        is_possible = ((logits[row].double() - logits[row].max()) / temperature[row]).exp() > 1e-12
        assert torch.equal(mask[row] & is_possible, expected & is_possible), (row, top_k[row], top_p[row])
        assert torch.equal(mask[row], truncation_mask_alone(logits, row, temperature, top_k, top_p, min_p))


def truncation_mask_alone(
    logits: Tensor, row: int, temperature: list, top_k: list, top_p: list, min_p: list
) -> Tensor:
    sampling = sampling_tensors(
        1, logits.shape[1], temperature=temperature[row], top_k=top_k[row], top_p=top_p[row], min_p=min_p[row]
    )
    return truncation_mask(logits[row : row + 1], sampling)[0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"top_k": 1}, [1]),
        ({"top_k": 2}, [1, 2]),
        ({"top_p": 1e-30}, [1]),
        ({"top_p": 0.25}, [1]),
        ({"top_p": 0.5}, [1, 2]),
        ({"top_p": 0.51}, [1, 2, 4]),
        ({"min_p": 1.0}, [1, 2, 4, 5]),
        ({"top_k": 2, "top_p": 0.5}, [1]),
        ({"top_k": 3, "top_p": 0.5}, [1, 2]),
        ({"top_k": 6, "top_p": 1.0}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_ties_are_kept_by_rising_id(fields: dict, expected: list[int]) -> None:
    logits = torch.tensor([[-60.0, 2.0, 2.0, -60.0, 2.0, 2.0]])
    mask = truncation_mask(logits, sampling_tensors(1, 6, temperature=1.0, **fields))
    assert mask[0].nonzero()[:, 0].tolist() == expected


def test_top_p_one_keeps_the_far_tail() -> None:
    logits = torch.linspace(0, -200, 500)[None].repeat(2, 1)
    mask = truncation_mask(logits, sampling_tensors(2, 500, temperature=1.0, top_p=[1.0, 0.9]))
    assert mask[0].all()
    assert 0 < mask[1].sum() < 20


@pytest.mark.parametrize("fault", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_greedy_and_faulty_rows_keep_all_and_leave_their_neighbours(fault: float) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 60, generator=generator)
    fields = {"top_k": 3, "top_p": 0.5, "min_p": 0.3}
    expected = truncation_mask(logits, sampling_tensors(4, 60, temperature=1.0, **fields))
    if fault == -float("inf"):
        logits[1] = fault
    else:
        logits[1, 7] = fault
    mask = truncation_mask(logits, sampling_tensors(4, 60, temperature=[1.0, 1.0, 0.0, 1.0], **fields))
    assert mask[1].all()
    assert mask[2].all()
    assert torch.equal(mask[[0, 3]], expected[[0, 3]])
