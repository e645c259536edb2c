"""The folder in which pulled models are kept.

What lies inside it is left to `pull`; this is the one file that reads `EYAS_CACHE`.
"""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder that `EYAS_CACHE` names, else `~/.cache/eyas`. It need not exist."""
    named = os.environ.get("EYAS_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "eyas"
