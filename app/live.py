"""Brings a running server to what its `user_config` asks for, and says how far it is.

A change that cannot be made is refused by itself, told, and never raised: Serve would take the replica down
for it. Loading a draft is left to the engine, which serves on meanwhile.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from app.choices import Limits
from app.config import ServerConfig
from app.draft_prefetch import prefetch
from app.drafts import NO_DRAFT
from app.live_config import LiveConfig
from engine import EyasError

logger = logging.getLogger(__name__)

Prefetch = Callable[[str, str | None, str | None], Path]


class LiveEngine(Protocol):
    """What can change in an engine that runs; `engine.AsyncEngine` is one."""

    def load_draft(self, folder: Path, digest: str | None = None) -> None: ...
    def switch_speculation(self, mode: str) -> None: ...


@dataclass(frozen=True, slots=True)
class LiveStatus:
    """The configuration asked for last, whose `refusals` say which keys are not in force and why. What became
    of a draft that is fetched is told by the engine.
    """

    config: LiveConfig
    is_fetching: bool
    refusals: tuple[tuple[str, str], ...]


class LiveControl:
    """Belongs to the event loop of its server; `apply` returns at once."""

    def __init__(
        self,
        engine: LiveEngine,
        config: ServerConfig,
        limits: Limits,
        limit: Callable[[Limits], None],
        fetch: Prefetch = prefetch,
        replica: str = "local",
    ) -> None:
        self._engine, self._limits, self._limit, self._fetch = engine, limits, limit, fetch
        self._model, self._replica = config.model, replica
        self._start = LiveConfig(
            draft=None if config.draft == NO_DRAFT else config.draft,
            speculation=config.engine.speculation.mode,
            max_prompt_tokens=limits.max_prompt_tokens,
            max_concurrent_calls=limits.max_concurrent_calls,
        )
        self._wanted = self._start
        self._refusals: dict[str, str] = {}
        self._loading: asyncio.Task[None] | None = None

    def apply(self, user_config: Any) -> None:
        """Begin to change what differs from before. Never raises; see `status`."""
        try:
            wanted = LiveConfig.parse(user_config).for_replica(self._replica).over(self._start)
        except EyasError as error:
            self._refuse("user_config", error)
            return
        before, self._wanted = self._wanted, wanted
        has_failed = set(self._refusals)
        self._refusals.clear()
        logger.info("live configuration %s", wanted.model_dump())
        self._limit(
            replace(
                self._limits,
                max_prompt_tokens=wanted.max_prompt_tokens,
                max_concurrent_calls=wanted.max_concurrent_calls,
            )
        )
        if wanted.speculation != before.speculation or "speculation" in has_failed:
            self._switch(wanted.speculation)
        is_other = (wanted.draft, wanted.draft_digest) != (before.draft, before.draft_digest)
        if is_other or "draft" in has_failed:
            self._load(wanted)

    def status(self) -> LiveStatus:
        is_fetching = self._loading is not None and not self._loading.done()
        return LiveStatus(self._wanted, is_fetching, tuple(self._refusals.items()))

    def close(self) -> None:
        if self._loading is not None:
            self._loading.cancel()

    def _switch(self, mode: str | None) -> None:
        assert mode is not None, "every server starts with a mode"
        try:
            self._engine.switch_speculation(mode)
        except EyasError as error:
            self._refuse("speculation", error)

    def _load(self, wanted: LiveConfig) -> None:
        """Fetch and load a draft in the background, in place of one that is being fetched."""
        self.close()
        self._loading = asyncio.get_running_loop().create_task(self._fetch_and_load(wanted))

    async def _fetch_and_load(self, wanted: LiveConfig) -> None:
        try:
            folder = await asyncio.to_thread(self._fetch, self._model, wanted.draft, wanted.draft_digest)
            self._engine.load_draft(folder, wanted.draft_digest)
        except (EyasError, OSError) as error:
            self._refuse("draft", error)

    def _refuse(self, key: str, error: Exception) -> None:
        logger.error("live configuration refused key=%s reason=%r", key, str(error))
        self._refusals[key] = str(error)
