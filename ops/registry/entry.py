"""What a registry says of a draft: the digests of its files, of its base model and of the tokenizer.

Where entries and files lie is left to `registry`.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import DraftFacts, EyasError

FORMAT = 1
DIGEST_LENGTH = 64  # hex digits of a sha256
FILES = frozenset({"config.json", "manifest.json", "model.safetensors", "trees.json"})


class RegistryError(EyasError):
    """A registry has no such draft, its files are not what they were, or it cannot be read or written."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a draft."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class DraftEntry:
    """A draft in a registry. `id` covers `files` and `facts`, not its name nor the time it was added."""

    files: dict[str, StoredFile]
    facts: DraftFacts
    name: str
    added: str  # ISO 8601, UTC

    @property
    def id(self) -> str:
        """The sha256 of the canonical text of what the draft is."""
        return hashlib.sha256(json.dumps(self._content(), sort_keys=True).encode()).hexdigest()

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files.values())

    def _content(self) -> dict[str, Any]:
        files = {name: dataclasses.asdict(file) for name, file in self.files.items()}
        return {"format": FORMAT, "files": files, "facts": dataclasses.asdict(self.facts)}

    def to_json(self) -> str:
        fields = {"id": self.id, "name": self.name, "added": self.added}
        return json.dumps({**fields, **self._content()}, indent=2) + "\n"


def parse_entry(text: str, expected_id: str) -> DraftEntry:
    """Read an entry. Raises `RegistryError` where its content is not what its id says, and for files that no
    draft has: their names are where a copy is written.
    """
    try:
        values = json.loads(text)
        if values["format"] != FORMAT:
            raise RegistryError(f"draft {expected_id}: expected format {FORMAT}, found {values['format']!r}")
        files = {name: StoredFile(**file) for name, file in values["files"].items()}
        entry = DraftEntry(files, DraftFacts(**values["facts"]), str(values["name"]), str(values["added"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RegistryError(f"draft {expected_id}: its entry is corrupt: {error!r}") from error
    if foreign := entry.files.keys() - FILES:
        raise RegistryError(f"draft {expected_id}: {min(foreign)!r} is no file of a draft")
    if entry.id != expected_id:
        raise RegistryError(
            f"draft {expected_id}: its entry is corrupt: its content is that of {entry.id}; add it again"
        )
    return entry


def stored_file(path: Path) -> StoredFile:
    with path.open("rb") as file:
        return StoredFile(hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size)
