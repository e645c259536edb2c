"""A draft head's `config.json`: every key checked by name before a `DraftConfig` is made of it.

What sizes a head may have is left to `config`.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from engine.draft.config import DraftConfig, is_number, quote
from engine.errors import ModelLoadError
from engine.model.config import RopeScaling
from engine.weights.json_object import read_json_object

# Keys that configs written before them lack; their defaults are what such a head is.
_OPTIONAL = (
    *("base_model_digest", "style", "tap_norm", "is_residual_normed", "has_fc_bias", "has_own_embedding"),
    *("has_own_head", "has_first_pair"),
)


def save_config(config: DraftConfig, path: Path) -> None:
    """Write the config as JSON."""
    path.write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")


def load_config(path: Path) -> DraftConfig:
    """Read a config. Raises `ModelLoadError` naming the file and the first key that is missing, unknown,
    or of a wrong type or size.
    """
    raw = read_json_object(path)
    try:
        _check_keys(raw, DraftConfig, "draft", optional=_OPTIONAL)
        taps, scaling = raw.pop("taps"), raw.pop("rope_scaling")
        if not isinstance(taps, list):
            raise ModelLoadError(f"draft taps must be a list of integers, found {quote(taps)}")
        return DraftConfig(**raw, taps=tuple(taps), rope_scaling=_read_scaling(scaling))
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error


def _read_scaling(raw: object) -> RopeScaling | None:
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise ModelLoadError(f"draft rope_scaling must be an object or null, found {quote(raw)}")
    _check_keys(raw, RopeScaling, "draft rope_scaling")
    for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position"):
        if not is_number(raw[name]) or raw[name] <= 0.0:
            raise ModelLoadError(
                f"draft rope_scaling.{name} must be a positive number, found {quote(raw[name])}"
            )
    try:
        return RopeScaling(**raw)
    except ModelLoadError as error:
        raise ModelLoadError(f"draft rope_scaling: {error}") from error


def _check_keys(raw: dict[str, Any], kind: type, name: str, optional: tuple[str, ...] = ()) -> None:
    known = [field.name for field in dataclasses.fields(kind)]
    for key in known:
        if key not in raw and key not in optional:
            raise ModelLoadError(f"{name} needs {key}, found no such key")
    for key in raw:
        if key not in known:
            raise ModelLoadError(f"{name} has the unknown key {quote(key)}: remove it")
