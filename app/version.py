"""The version of Eyas that runs.

Where it is written is left to `pyproject.toml`.
"""

import importlib.metadata

SOURCE_VERSION = "0+source"  # a checkout that is not installed


def version() -> str:
    """Return the installed version, or `SOURCE_VERSION`."""
    try:
        return importlib.metadata.version("eyas")
    except importlib.metadata.PackageNotFoundError:
        return SOURCE_VERSION
