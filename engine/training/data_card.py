"""What a folder of training data says about itself: whose tokens they are and how they were made.

The tokens are left to `dataset`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, ModelLoadError
from engine.weights.digest import file_digest
from engine.weights.json_object import read_json_object

CARD = "data.json"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class DataCard:
    """`tokenizer_digest` names the tokenizer that made the tokens; `source` tells how, as plain values."""

    tokenizer_digest: str
    source: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(model: Path, source: Mapping[str, Any]) -> "DataCard":
        """Return the card of data made with the tokenizer of a model folder."""
        return DataCard(file_digest(model / TOKENIZER), json.loads(json.dumps(source)))

    def save(self, folder: Path) -> None:
        """Write the card, whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"tokenizer_digest": self.tokenizer_digest, "source": self.source}, indent=2)
        temporary = folder / f".{CARD}.tmp"
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(folder / CARD)

    @staticmethod
    def load(folder: Path) -> "DataCard":
        """Read the card of a folder. Raises `ModelLoadError` where there is none or it is damaged."""
        match read_json_object(folder / CARD):
            case {"tokenizer_digest": str(digest), "source": dict(source)}:
                return DataCard(digest, source)
        raise ModelLoadError(f"{folder / CARD} must hold tokenizer_digest and source")

    def check_model(self, model: Path) -> None:
        """Raise `ConfigError` where the model's tokenizer is not the one that made the data."""
        found = file_digest(model / TOKENIZER)
        if found != self.tokenizer_digest:
            raise ConfigError(
                f"the data was made with tokenizer {self.tokenizer_digest[:12]}, that of {model} is "
                f"{found[:12]}: make the data again with this model"
            )
