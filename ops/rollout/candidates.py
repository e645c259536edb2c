"""Candidates of a rollout out of a registry.

Keeping drafts is left to `ops.registry`.
"""

import logging
from pathlib import Path

from ops.registry.entry import RegistryError
from ops.registry.registry import Registry

logger = logging.getLogger(__name__)


class RegistryDrafts:
    """See `Drafts`. Replicas find the registry at `replica_root`, where that is another path than here;
    a registry behind a URL is copied to `cache` first, which replicas must see.
    """

    def __init__(self, registry: Registry, model: Path, cache: Path, replica_root: str | None) -> None:
        self._registry, self._model, self._cache = registry, model, cache
        self._replica_root = replica_root

    def digest(self, draft: str) -> str:
        return self._registry.get(draft).facts.weights_digest

    def verify(self, draft: str) -> None:
        self._registry.verify(self._registry.get(draft), self._model)

    def fetch(self, draft: str) -> str:
        entry = self._registry.get(draft)
        try:
            self._registry.mark_tried(entry)
        except RegistryError as error:  # a registry for reading only: nobody removes drafts from here either
            logger.warning("the registry does not know that draft %s is tried: %s", entry.id, error)
        folder = self._registry.folder(entry, self._cache)
        return str(folder.resolve() if self._replica_root is None else Path(self._replica_root) / entry.id)

    def mark_stable(self, draft: str) -> None:
        self._registry.mark_stable(self._registry.get(draft))
