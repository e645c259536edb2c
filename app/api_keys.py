"""Which API keys a server takes; without any, everybody may call.

Keys come from a file with one a line (blank lines and lines that begin with # are skipped) and from the
environment. What needs a key is left to `access`.
"""

import hashlib
import hmac
import os
from collections.abc import Iterable
from pathlib import Path

from engine import ConfigError

ENVIRONMENT_VARIABLE = "EYAS_API_KEYS"  # keys separated by commas


class ApiKeys:
    """A set of keys. Only digests are kept, so that no dump or traceback shows a key."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = frozenset(_digest(key.encode()) for key in keys)

    @property
    def is_empty(self) -> bool:
        return not self._digests

    def allows(self, key: bytes) -> bool:
        """Whether `key` is one of ours; how long that takes says nothing about how near it was."""
        digest = _digest(key)
        is_known = False
        for known in self._digests:
            is_known |= hmac.compare_digest(known, digest)
        return is_known


def load_api_keys(path: Path | None) -> ApiKeys:
    """Read the keys of `path` and of the environment. Raises `ConfigError` where the file has none."""
    keys = [key.strip() for key in os.environ.get(ENVIRONMENT_VARIABLE, "").split(",")]
    if path is not None:
        keys += _read(path)
    return ApiKeys(key for key in keys if key)


def _read(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ConfigError(f"cannot read api_key_file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"api_key_file {path} must be UTF-8 text") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        # A truncated file must not open the server to everybody.
        raise ConfigError(f"api_key_file {path} holds no key: write one a line")
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
