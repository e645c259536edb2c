"""A drafter that cannot end a step: what it raises is kept, and from then on it drafts nothing.

A tree without drafts is verified like any other and emits the target's own token, so no output changes.
Turning speculation off is left to the engine.
"""

import logging
from collections.abc import Callable

from engine.draft.drafter import Drafter, DraftNoise, PromptPairs
from engine.draft.network import DraftNetwork
from engine.kvcache.kv_pool import KVPool
from engine.speculation import DraftOutput, TreeTensors
from engine.step_rows import AlignWindow

logger = logging.getLogger(__name__)


class GuardedDrafter:
    """Drafts with what `make` returns for a head and its pages, until that raises; `failure` then says
    what.
    """

    def __init__(
        self, make: Callable[[DraftNetwork, KVPool], Drafter], head: DraftNetwork, pool: KVPool
    ) -> None:
        self._make = make
        self._inner = make(head, pool)
        self.failure = ""

    @property
    def head(self) -> DraftNetwork:
        return self._inner.head

    @property
    def pool(self) -> KVPool:
        return self._inner.pool

    def adopt(self, head: DraftNetwork, pool: KVPool) -> None:
        """Draft with another head from now on, nothing of which is in `pool` yet. It is trusted anew."""
        self._inner = self._make(head, pool)
        self.failure = ""

    def fill(self, pairs: PromptPairs) -> None:
        """See `TreeDrafter.fill`."""
        if not self.failure:
            try:
                self._inner.fill(pairs)
            except Exception as error:  # the edge of a draft: the target's answer must not depend on it
                self._fail(error)

    def draft(self, window: AlignWindow, tree: TreeTensors, noise: DraftNoise, draft: DraftOutput) -> None:
        """See `TreeDrafter.draft`; where it fails, what was drafted until then stays."""
        if not self.failure:
            try:
                self._inner.draft(window, tree, noise, draft)
            except Exception as error:  # as above
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.failure = f"{type(error).__name__}: {error}"
        logger.exception("draft failed")
