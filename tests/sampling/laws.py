"""The chi-square test of a law, with sparse cells pooled.

What the law is, is left to the test files.
"""

import torch
from scipy import stats
from torch import Tensor


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
