"""Reading of the JSON files of a model folder.

What their keys mean is left to the callers.
"""

import json
from pathlib import Path
from typing import Any

from engine.errors import ModelLoadError


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; anything else is a `ModelLoadError` that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} must be a readable JSON file: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value
