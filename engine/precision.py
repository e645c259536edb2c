"""In how many bits weights and K/V are kept, where that is fewer than the model's dtype has.

Who computes with them is left to `layers/quantize` and to the attention kernels.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from engine.errors import ConfigError

TargetBits = Literal["model", "fp8"]
DraftBits = Literal["model", "int4-ffn"]
CacheBits = Literal["model", "fp8"]


@dataclass(frozen=True, slots=True)
class PrecisionConfig:
    """ "model" keeps the model's dtype. All else changes what is computed, by rounding.

    `target` "fp8" puts every linear layer of the target into float8, with a scale per output channel and per
    token. `draft` "int4-ffn" puts the MLPs of the draft into four bits: its drafts change, the output does
    not. `cache` "fp8" keeps the K/V of both in float8, for twice the positions, on a GPU only.
    """

    target: TargetBits = "model"
    draft: DraftBits = "model"
    cache: CacheBits = "model"

    def __post_init__(self) -> None:
        for name, kinds in (("target", TargetBits), ("draft", DraftBits), ("cache", CacheBits)):
            known, value = get_args(kinds), getattr(self, name)
            if value not in known:
                raise ConfigError(f"precision.{name} must be one of {', '.join(known)}, found {value!r}")
