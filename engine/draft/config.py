"""The shape of a draft head, as its `config.json` states it.

Whether a head fits a target is checked here too; reading the tensors is left to `draft/loader`.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        if not self.taps or any(tap not in range(self.target_num_layers + 1) for tap in self.taps):
            raise ModelLoadError(f"draft taps must lie in 0..{self.target_num_layers}, found {self.taps}")
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
            if type(value) is not int or value < 1:
                raise ModelLoadError(f"draft {name} must be an integer of at least 1, found {value!r}")
        for name in ("rms_norm_eps", "rope_theta"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ModelLoadError(f"draft {name} must be positive and finite, found {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads != 0 or self.head_dim % 2 != 0:
            raise ModelLoadError(
                "draft num_heads must be a multiple of num_kv_heads and head_dim even, found "
                f"{self.num_heads}, {self.num_kv_heads} and {self.head_dim}"
            )
        if not isinstance(self.is_feedback_normed, bool):
            raise ModelLoadError(
                f"draft is_feedback_normed must be true or false, found {self.is_feedback_normed!r}"
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
        digests = (self.base_model_digest, base_model_digest)
        if None not in digests and digests[0] != digests[1]:
            raise DraftMismatchError(
                f"the draft was trained on target weights {digests[0]}, these weights are {digests[1]}: "
                "choose a draft trained for this model"
            )

    def save(self, path: Path) -> None:
        """Write the config as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @staticmethod
    def load(path: Path) -> "DraftConfig":
        """Read a config; raises `ModelLoadError` on a missing file, bad JSON, or missing, unknown or
        ill-typed keys.
        """
        try:
            raw: dict[str, Any] = json.loads(path.read_text())
            scaling = raw.pop("rope_scaling")
            raw["taps"] = tuple(raw["taps"])
            return DraftConfig(**raw, rope_scaling=RopeScaling(**scaling) if scaling else None)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelLoadError(f"{path} is not a draft config: {error}") from error
