"""Where the draft of a model lies: the folder that was named, or the one that is shipped for it.

Reading it is left to the engine.
"""

from pathlib import Path

import engine
from engine import ConfigError

SHIPPED_DRAFTS = Path(engine.__file__).parent / "draft" / "pretrained"
AUTO_DRAFT = "auto"
NO_DRAFT = "none"


def draft_folder(model: str, draft: str) -> Path | None:
    """Return the folder of the draft, or None. Raises `ConfigError` where a named one is missing."""
    if draft == NO_DRAFT:
        return None
    if draft == AUTO_DRAFT:
        # Compared, not joined: an absolute path would replace the folder it is joined to.
        shipped = [path.parent for path in SHIPPED_DRAFTS.glob("*/config.json")]
        return next((folder for folder in shipped if folder.name == model), None)
    folder = Path(draft).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"draft must be a folder, {AUTO_DRAFT} or {NO_DRAFT}, found {draft!r}")
    return folder
