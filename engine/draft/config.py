"""The shape of a draft head, and whether it fits a target.

Reading and writing its `config.json` is left to `config_file`, the tensors to `loader`.
"""

import json
import sys
from dataclasses import dataclass

from engine.errors import DraftMismatchError, ModelLoadError
from engine.layers.decoder import LayerShape
from engine.model.config import ModelConfig, RopeScaling


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """An EAGLE-3 style head of 1 to 3 decoder layers over `taps` of its target.

    A tap i < target layers is the residual stream *after* layer i; tap == target layers is the state after
    the final norm. The head drafts over `draft_vocab_size` tokens, `target_vocab_size` meaning all of them.
    `is_feedback_normed` says whether the feature fed to the next draft step is taken after the final norm.
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
        if self.hidden_size != self.target_hidden_size:
            # The head shares the target's embedding and output rows, so a width of its own has nothing to
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
        if not isinstance(self.is_feedback_normed, bool):
            raise ModelLoadError(
                f"draft is_feedback_normed must be true or false, found {quote(self.is_feedback_normed)}"
            )
        if not isinstance(self.base_model_digest, str | None):
            raise ModelLoadError(
                f"draft base_model_digest must be text or null, found {quote(self.base_model_digest)}"
            )

    @property
    def feature_size(self) -> int:
        """Width of the target features that one token brings: taps times target hidden size."""
        return len(self.taps) * self.target_hidden_size

    def layer_shape(self, layer_idx: int) -> LayerShape:
        """Return the sizes of one layer; the first reads the token and the feature side by side."""
        return LayerShape(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
            input_size=self.hidden_size * (2 if layer_idx == 0 else 1),
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
