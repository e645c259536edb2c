"""Sampling tensors from plain values, plain references for truncation, and the chi-square test of a law.

What is tested is left to the test files.
"""

from collections.abc import Sequence

import torch
from scipy import stats
from torch import Tensor

from engine.speculation import SamplingTensors

Values = float | Sequence[float]


def sampling_tensors(
    num_rows: int,
    vocab_size: int,
    *,
    temperature: Values = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: Values = 1.0,
    min_p: Values = 0.0,
    repetition_penalty: Values = 1.0,
    presence_penalty: Values = 0.0,
    frequency_penalty: Values = 0.0,
    seed: int | Tensor = 0,
    bias: tuple[tuple[int, float], ...] = (),
    prompt: Tensor | None = None,
    stop_token_ids: tuple[int, ...] = (),
    stop_from: int | Sequence[int] = 0,
) -> SamplingTensors:
    """Build the tensors of `num_rows` rows; a single value is every row's."""

    def floats(values: Values) -> Tensor:
        return torch.as_tensor(values, dtype=torch.float32).expand(num_rows).clone()

    def ints(values: int | Sequence[int] | Tensor) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64).expand(num_rows).clone()

    k = ints(top_k)
    fields = {
        "temperature": floats(temperature),
        "top_p": floats(top_p),
        "min_p": floats(min_p),
        "repetition_penalty": floats(repetition_penalty),
        "presence_penalty": floats(presence_penalty),
        "frequency_penalty": floats(frequency_penalty),
    }
    is_penalized = bool(
        (fields["repetition_penalty"] != 1).any()
        or (fields["presence_penalty"] != 0).any()
        or (fields["frequency_penalty"] != 0).any()
    )
    width = vocab_size if is_penalized else 0
    return SamplingTensors(
        **fields,
        top_k=torch.where(k > 0, k, vocab_size),
        seed=ints(seed),
        bias_token_ids=torch.tensor([[token for token, _ in bias]] * num_rows, dtype=torch.int64),
        bias_values=torch.tensor([[value for _, value in bias]] * num_rows, dtype=torch.float32),
        prompt_mask=torch.zeros(num_rows, width, dtype=torch.bool) if prompt is None else prompt,
        output_counts=torch.zeros(num_rows, width, dtype=torch.int32),
        stop_token_ids=torch.tensor([stop_token_ids] * num_rows, dtype=torch.int64),
        stop_from=ints(stop_from),
        is_sampled=bool((fields["temperature"] > 0).any()),
        is_truncated=bool((k > 0).any() or (fields["top_p"] < 1).any() or (fields["min_p"] > 0).any()),
        is_penalized=is_penalized,
        is_biased=bool(bias),
        has_min_tokens=bool(stop_token_ids),
    )


def sorted_truncation(
    logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Return [V] bool: top-k, then top-p of what is left, then min-p, of one row [V], by a stable sort."""
    order = logits.double().sort(descending=True, stable=True).indices
    ranked = logits.double()[order]
    mass = ((ranked - ranked[0]) / temperature).exp()
    kept = mass >= min_p
    if top_k:
        kept[top_k:] = False
        mass[top_k:] = 0.0
    if top_p < 1:
        kept &= mass.cumsum(0) - mass < torch.tensor(top_p).double() * mass.sum()
    mask = torch.empty_like(kept)
    mask[order] = kept
    return mask


def target_probs(
    logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Return [..., V] float64: the law that a token of `logits` [..., V] must have."""
    rows = logits.reshape(-1, logits.shape[-1])
    masks = torch.stack([sorted_truncation(row, temperature, top_k, top_p, min_p) for row in rows])
    scaled = (rows.double() / temperature).masked_fill(~masks, -torch.inf)
    return scaled.softmax(-1).reshape(logits.shape)


def law_p_value(counts: Tensor, law: Tensor) -> float:
    """Return the chi-square p-value of counts [G, K] under the laws [G, K], each given its group's total.

    Cells that expect fewer than 5 are pooled within their group; an impossible cell with a count gives 0.
    """
    counts, law = counts.double(), law.double()
    if bool((counts[law <= 0] > 0).any()):
        return 0.0
    statistic, freedom = 0.0, 0
    for observed, probs in zip(counts, law, strict=True):
        expected = observed.sum() * probs
        is_sparse = expected < 5
        observed = torch.cat((observed[~is_sparse], observed[is_sparse].sum()[None]))
        expected = torch.cat((expected[~is_sparse], expected[is_sparse].sum()[None]))
        is_used = expected >= 5
        if int(is_used.sum()) < 2:
            continue
        statistic += float(((observed - expected)[is_used] ** 2 / expected[is_used]).sum())
        freedom += int(is_used.sum()) - 1
    assert freedom > 0, "no group has enough draws to test"
    return float(stats.chi2.sf(statistic, freedom))


def count_pairs(groups: Tensor, cells: Tensor, num_groups: int, num_cells: int) -> Tensor:
    """Return [num_groups, num_cells]: how often each (group, cell) occurs."""
    return torch.bincount(groups * num_cells + cells, minlength=num_groups * num_cells).view(
        num_groups, num_cells
    )
