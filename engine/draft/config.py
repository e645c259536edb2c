"""The shape of a draft head, and whether it fits a target.

Reading and writing its `config.json` is left to `config_file`, the tensors to `loader`.
"""

import json
import sys
from dataclasses import dataclass
from typing import Literal, get_args

from engine.errors import DraftMismatchError, ModelLoadError
from engine.layers.decoder import LayerShape
from engine.model.config import ModelConfig, RopeScaling

HeadStyle = Literal["eagle3", "eagle1"]
TapNorm = Literal["none", "joint", "each"]
_FLAGS = (
    *("is_feedback_normed", "is_residual_normed", "has_fc_bias", "has_own_embedding", "has_own_head"),
    "has_first_pair",
)


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """A head of 1 to 3 decoder layers over `taps` of its target.

    A tap i < target layers is the residual stream *after* layer i; tap == target layers is the state after
    the final norm. The head drafts over `draft_vocab_size` tokens, `target_vocab_size` meaning all of them.
    `is_feedback_normed` says whether the feature fed to the next draft step is taken after the final norm.

    What heads made elsewhere may have besides: `tap_norm` norms the taps before they are fused, as one or
    each by itself; `is_residual_normed` starts the residual stream from the normed feature; embedding and
    output rows of their own, and with both a `hidden_size` of their own; no pair at a text's first token.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position: int
    taps: tuple[int, ...]
    target_hidden_size: int
    target_vocab_size: int
    target_num_layers: int
    draft_vocab_size: int
    is_feedback_normed: bool
    base_model_digest: str | None = None
    style: HeadStyle = "eagle3"
    tap_norm: TapNorm = "none"
    is_residual_normed: bool = False
    has_fc_bias: bool = False
    has_own_embedding: bool = False
    has_own_head: bool = False
    has_first_pair: bool = True

    def __post_init__(self) -> None:
        self._check_sizes()
        if not 1 <= self.num_layers <= 3:
            raise ModelLoadError(f"a draft head has 1 to 3 layers, found {self.num_layers}")
        if not self.taps or not all(
            type(tap) is int and 0 <= tap <= self.target_num_layers for tap in self.taps
        ):
            raise ModelLoadError(
                f"draft taps must be integers of 0 to {self.target_num_layers}, found {quote(self.taps)}"
            )
        self._check_style()
        if self.hidden_size != self.target_hidden_size and not (self.has_own_embedding and self.has_own_head):
            # A head that shares the target's embedding and output rows has nothing of another width to
            # multiply.
            raise ModelLoadError(
                f"draft hidden_size {self.hidden_size} must equal target_hidden_size "
                f"{self.target_hidden_size}"
            )
        if not 1 <= self.draft_vocab_size <= self.target_vocab_size:
            raise ModelLoadError(
                f"draft_vocab_size must lie in 1..{self.target_vocab_size}, found {self.draft_vocab_size}"
            )

    def _check_sizes(self) -> None:
        """Refuse what no layer can have, by name: the weights alone would not show every such slip."""
        sizes = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        targets = ("target_hidden_size", "target_vocab_size", "target_num_layers", "draft_vocab_size")
        for name in (*sizes, "max_position", *targets):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value < 2**31:
                raise ModelLoadError(f"draft {name} must be an integer of at least 1, found {quote(value)}")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not is_number(value) or value <= 0.0:
                raise ModelLoadError(f"draft {name} must be a positive number, found {quote(value)}")
        if self.num_heads % self.num_kv_heads != 0 or self.head_dim % 2 != 0:
            raise ModelLoadError(
                "draft num_heads must be a multiple of num_kv_heads and head_dim even, found "
                f"{self.num_heads}, {self.num_kv_heads} and {self.head_dim}"
            )
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ModelLoadError(
                    f"draft {name} must be true or false, found {quote(getattr(self, name))}"
                )
        if not isinstance(self.base_model_digest, str | None):
            raise ModelLoadError(
                f"draft base_model_digest must be text or null, found {quote(self.base_model_digest)}"
            )

    def _check_style(self) -> None:
        """Refuse what a network of this style does not have."""
        for name, value, known in (
            ("style", self.style, get_args(HeadStyle)),
            ("tap_norm", self.tap_norm, get_args(TapNorm)),
        ):
            if value not in known:
                raise ModelLoadError(f"draft {name} must be one of {', '.join(known)}, found {quote(value)}")
        is_plain = self.tap_norm == "none" and not (
            self.is_feedback_normed or self.is_residual_normed or self.has_own_embedding or self.has_own_head
        )
        if self.style == "eagle1" and not (is_plain and self.taps == (self.target_num_layers,)):
            raise ModelLoadError(
                f"a draft of style eagle1 reads the target's last state, taps [{self.target_num_layers}], "
                "and has neither norms around its layers nor rows of its own"
            )
        if self.style == "eagle3" and self.has_fc_bias:
            raise ModelLoadError("a draft of style eagle3 has no bias in its fusion")

    @property
    def feature_size(self) -> int:
        """Width of the target features that one token brings: taps times target hidden size."""
        return len(self.taps) * self.target_hidden_size

    def layer_shape(self, layer_idx: int) -> LayerShape:
        """Return the sizes of one layer; in EAGLE-3 the first reads token and feature side by side."""
        return LayerShape(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
            input_size=self.hidden_size * (2 if layer_idx == 0 and self.style == "eagle3" else 1),
        )

    def check_target(self, target: ModelConfig, base_model_digest: str | None) -> None:
        """Raise `DraftMismatchError` naming the first difference if this head was not made for `target`."""
        pairs = (
            ("hidden size", self.target_hidden_size, target.hidden_size),
            ("vocabulary size", self.target_vocab_size, target.vocab_size),
            ("number of layers", self.target_num_layers, target.num_layers),
        )
        for name, expected, found in pairs:
            if expected != found:
                raise DraftMismatchError(
                    f"the draft was made for a target with {name} {expected}, this target has {found}: "
                    "choose a draft trained for this model"
                )
        if self.max_position < target.max_position:
            raise DraftMismatchError(
                f"the draft was made for max_position {self.max_position}, this target has "
                f"{target.max_position}: choose a draft trained for this model"
            )
        digests = (self.base_model_digest, base_model_digest)
        if None not in digests and digests[0] != digests[1]:
            raise DraftMismatchError(
                f"the draft was trained on target weights {digests[0]}, these weights are {digests[1]}: "
                "choose a draft trained for this model"
            )


def is_number(value: object) -> bool:
    """Whether a value of a file is a finite number; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # NaN is not at most anything


def quote(value: object) -> str:
    """Return a value as its file has it, not longer than a line takes."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
