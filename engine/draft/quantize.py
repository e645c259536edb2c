"""Weight-only quantization of a draft's large matrices: INT4 by groups, or FP8 by rows.

A quantized matrix W is stored as two tensors, W.int4 or W.fp8 and W.scale, and read back as plain numbers;
kernels that multiply packed weights are left to `layers`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.errors import ConfigError, ModelLoadError
from engine.weights.shards import TensorSource

Precision = Literal["int4", "fp8"]
FFN_MATRICES = ("gate_up_proj.weight", "down_proj.weight")
HEAD_MATRIX = "head_rows"
_LEVELS = 7  # of a signed nibble on each side of 0; -8 has no counterpart and stays unused
_CLIPS = tuple(
    1.0 - 0.02 * step for step in range(16)
)  # shares of the largest weight that may be its group's end
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def quantize_int4(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return (packed [O, I / 2] uint8, scale [O, I / group_size] float32) of weight [O, I].

    w = scale * n with n in -7..7; element 2i is the low nibble of byte i, stored as n + 8. Each group takes
    the scale of least squared error among a few that clip its largest weights.
    """
    num_rows, num_columns = weight.shape
    if num_columns % group_size != 0 or group_size % 2 != 0:
        raise ConfigError(f"the group size must be even and divide {num_columns} columns, found {group_size}")
    groups = weight.float().view(num_rows, -1, group_size)
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    best, best_error = largest / _LEVELS, torch.full_like(largest, torch.inf)
    for clip in _CLIPS:
        scale = (largest * clip / _LEVELS).bfloat16().float()  # as it will be stored
        error = (_round(groups, scale) * scale - groups).square().sum(-1, keepdim=True)
        best = torch.where(error < best_error, scale, best)
        best_error = torch.minimum(error, best_error)
    nibbles = (_round(groups, best) + 8).to(torch.uint8).view(num_rows, -1, 2)
    return nibbles[..., 0] | nibbles[..., 1] << 4, best.squeeze(-1)


def dequantize_int4(packed: Tensor, scale: Tensor) -> Tensor:
    """Return the weight [O, I] float32 of packed [O, I / 2] uint8 and scale [O, G]."""
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    groups = nibbles.float().view(*scale.shape, -1) - 8
    return (groups * scale.float()[..., None]).flatten(1)


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (rows [O, I] float8_e4m3fn, scale [O, 1] float32) of weight [O, I]."""
    largest = weight.float().abs().amax(-1, keepdim=True).clamp(min=1e-12)
    scale = (largest / _FP8_MAX).bfloat16().float()
    scaled = (weight.float() / scale).clamp(-_FP8_MAX, _FP8_MAX)
    return scaled.to(torch.float8_e4m3fn), scale


def dequantize_fp8(rows: Tensor, scale: Tensor) -> Tensor:
    """Return the weight [O, I] float32."""
    return rows.float() * scale.float()


@dataclass(frozen=True, slots=True)
class QuantizedTensors:
    """`tensors` as a file stores them, and by name how far the root mean square of each matrix is off."""

    tensors: Mapping[str, Tensor]
    relative_errors: Mapping[str, float]


def quantize_tensors(
    tensors: Mapping[str, Tensor], precision: Precision, group_size: int, has_head: bool
) -> QuantizedTensors:
    """Quantize the feed-forward matrices of a head's state, and its output rows where `has_head`."""
    stored: dict[str, Tensor] = {}
    errors = {}
    for name, value in tensors.items():
        if not (name.endswith(FFN_MATRICES) or (has_head and name == HEAD_MATRIX)):
            stored[name] = value
            continue
        if precision == "int4":
            packed, scale = quantize_int4(value, group_size)
            read = dequantize_int4(packed, scale)
        else:
            packed, scale = quantize_fp8(value)
            read = dequantize_fp8(packed, scale)
        stored |= {f"{name}.{precision}": packed, f"{name}.scale": scale.bfloat16()}
        errors[name] = float((read - value.float()).norm() / value.float().norm())
    return QuantizedTensors(stored, errors)


class DequantizedSource:
    """The tensors of a draft's file by their plain names: a `TensorSource`, quantized ones as float32."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._precisions: dict[str, str] = {}
        for name in source.names():
            plain, _, precision = name.rpartition(".")
            if precision in ("int4", "fp8"):
                if f"{plain}.scale" not in source.names():
                    raise ModelLoadError(f"the quantized tensor {plain} lacks its scale")
                self._precisions[plain] = precision

    def names(self) -> frozenset[str]:
        """Return the plain names."""
        hidden = {f"{name}.{kind}" for name, kind in self._precisions.items()}
        hidden |= {f"{name}.scale" for name in self._precisions}
        return self._source.names() - hidden | frozenset(self._precisions)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, read back where it is quantized."""
        precision = self._precisions.get(name)
        if precision is None:
            return self._source.shape(name)
        num_rows, *columns = self._source.shape(f"{name}.{precision}")
        return (num_rows, *(count * (2 if precision == "int4" else 1) for count in columns))

    def read(self, name: str) -> Tensor:
        """Return a tensor, read back where it is quantized. Raises `ModelLoadError` for unfit parts."""
        precision = self._precisions.get(name)
        if precision is None:
            return self._source.read(name)
        packed, scale = self._source.read(f"{name}.{precision}"), self._source.read(f"{name}.scale")
        self._check(name, packed, scale, precision)
        return dequantize_int4(packed, scale) if precision == "int4" else dequantize_fp8(packed, scale)

    def _check(self, name: str, packed: Tensor, scale: Tensor, precision: str) -> None:
        expected = torch.uint8 if precision == "int4" else torch.float8_e4m3fn
        num_columns = self.shape(name)[-1]
        fits = packed.dim() == 2 and scale.dim() == 2 and len(packed) == len(scale)
        if not fits or packed.dtype != expected or num_columns % scale.shape[1] != 0:
            raise ModelLoadError(
                f"the quantized tensor {name} of shape {list(packed.shape)}, {packed.dtype} does not go "
                f"with a scale of shape {list(scale.shape)}"
            )


def _round(groups: Tensor, scale: Tensor) -> Tensor:
    return (groups / scale).round().clamp(-_LEVELS, _LEVELS)
