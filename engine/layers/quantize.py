"""Putting the linear layers of decoder layers into fewer bits.

How a product in few bits is made is left to `fp8_linear` and `int4_linear`.
"""

from functools import partial
from typing import Literal

from torch import nn

from engine.layers.fp8_linear import Fp8Linear, QuantizeRows, quantize_rows
from engine.layers.int4_linear import Int4Linear
from engine.layers.linear import replace_linears

Quantization = Literal["fp8", "int4-ffn"]


def quantize(layers: nn.Module, kind: Quantization, quantize_rows: QuantizeRows = quantize_rows) -> None:
    """Replace linear layers inside `layers`; the plain weights of "fp8" are freed on the way.

    "fp8" takes them all, for a target; "int4-ffn" takes those of the MLPs, for a draft, whose steps are few
    tokens and the reading of weights. `quantize_rows` puts the tokens of an fp8 pass into float8. Raises
    `ConfigError` for sizes that have no kernels.
    """
    if kind == "fp8":
        replace_linears(layers, partial(Fp8Linear, quantize_rows=quantize_rows))
    else:
        replace_linears(layers, Int4Linear, ("gate_up_proj", "down_proj"))
