"""Linear layers in float8: one scale per output channel, one per token, through torch's scaled product.

Which layers are worth it is left to `quantize`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from engine.errors import ConfigError

# Takes x [T, K]; returns (x / scale in float8_e4m3fn [T, K], scale [T, 1] float32).
QuantizeRows = Callable[[Tensor], tuple[Tensor, Tensor]]

_FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max
_MULTIPLE = 16  # what the scaled product wants both sizes of a weight to be divisible by


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (rows [T, K] float8_e4m3fn, scale [T, 1] float32): the largest number of a row becomes 448.

    A row that is not finite gets a NaN for its scale, so that its whole product is NaN.
    """
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)
    scale = largest.clamp(min=torch.finfo(torch.float32).tiny * _FLOAT8_MAX) / _FLOAT8_MAX
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    return (x / scale).clamp(-_FLOAT8_MAX, _FLOAT8_MAX).to(torch.float8_e4m3fn), scale


class Fp8Linear(nn.Module):
    """y = x W^T + b with W [out, in] in float8, half the bytes of bfloat16; neither trained nor saved.

    The relative error of y is about 4% of its norm for random numbers: twice the 2.6% that rounding to three
    bits of mantissa costs, in quadrature.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, quantize_rows: QuantizeRows = quantize_rows
    ) -> None:
        super().__init__()
        if any(size % _MULTIPLE for size in weight.shape):
            raise ConfigError(
                f"float8 layers need sizes divisible by {_MULTIPLE}, found {tuple(weight.shape)}: run this "
                "model in bfloat16"
            )
        rows, scale = quantize_rows(weight.detach())
        self._weight, self._scale = rows.t(), scale.t()
        self._bias = None if bias is None else bias.detach()
        self._quantize_rows = quantize_rows

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, out] for x [T, in]."""
        rows, scale = self._quantize_rows(x)
        y: Tensor = torch._scaled_mm(  # noqa: SLF001
            rows, self._weight, scale, self._scale, self._bias, out_dtype=x.dtype, use_fast_accum=True
        )
        return y
