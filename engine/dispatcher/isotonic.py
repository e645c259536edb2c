"""Monotone least squares (pool adjacent violators). What must be monotone is left to its callers."""

from collections.abc import Sequence


def rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the non-decreasing sequence nearest to `values` in weighted squares (Ayer et al. 1955)."""
    if list(values) == sorted(values):
        return list(values)
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        mean, total, length = value, weight, 1
        while blocks and blocks[-1][0] > mean:
            last_mean, last_total, last_length = blocks.pop()
            mean = (mean * total + last_mean * last_total) / (total + last_total)
            total += last_total
            length += last_length
        blocks.append((mean, total, length))
    return [mean for mean, _, length in blocks for _ in range(length)]


def falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the non-increasing sequence nearest to `values` in weighted squares."""
    return rising(values[::-1], weights[::-1])[::-1]
