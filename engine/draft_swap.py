"""The draft of a running engine: loading another one beside it, swapping between steps, and giving up one
that fails.

Reading and installing weights is left to `runner/draft_site`, the choice of a tree to the dispatcher.
"""

import logging
import threading
from dataclasses import dataclass, replace
from pathlib import Path

from engine.draft_status import DraftState, DraftStatus
from engine.errors import EyasError
from engine.runner.draft_site import DraftSite, NextDraft
from engine.scheduler.scheduler import Scheduler
from engine.step_stats import StepStats
from engine.tree.topology import TreeTopology

logger = logging.getLogger(__name__)

_WINDOW = 500  # trees that one verdict looks at, at least
_WINDOW_STEPS = 50  # the same in steps: a large batch may be all of one kind
_LEAST_ACCEPTED = 5  # draft tokens of a window: a head of another target has hardly any right


@dataclass(frozen=True, slots=True)
class _Window:
    """What the steps since the last verdict drafted and kept."""

    num_steps: int = 0
    num_trees: int = 0
    num_accepted: int = 0

    @property
    def is_full(self) -> bool:
        return self.num_trees >= _WINDOW and self.num_steps >= _WINDOW_STEPS

    def after(self, num_trees: int, num_accepted: int) -> "_Window":
        num_steps = self.num_steps + (num_trees > 0)
        return _Window(num_steps, self.num_trees + num_trees, self.num_accepted + num_accepted)


class DraftSwap:
    """Belongs to the thread that steps the engine; only the reading of files runs beside it."""

    def __init__(self, site: DraftSite, scheduler: Scheduler, model_digest: str, digest: str | None) -> None:
        self._site, self._scheduler, self._model_digest = site, scheduler, model_digest
        state = DraftState.NONE if digest is None else DraftState.SERVING
        self._status = DraftStatus(digest, state)
        self._loading: _Loading | None = None
        self._num_foreign = 0  # steps to come back that another draft has drafted
        self._window = _Window()

    @property
    def status(self) -> DraftStatus:
        return self._status

    def load(self, folder: Path, digest: str | None) -> None:
        """Begin to load the draft of `folder`, whose weights must have `digest` where one is given. Never
        raises: what comes of it is in `status`. The last call counts.
        """
        logger.info("draft loading folder=%s digest=%s", folder, digest)
        library = self._scheduler.library
        num_siblings = max(library.get(name).max_rank for name in library.names) + 1
        self._loading = _Loading(self._site, folder, digest, self._model_digest, num_siblings)
        self._change(DraftState.LOADING)

    def settle(self) -> None:
        """Swap to a draft that is ready, or say why it cannot be. Between two steps only."""
        loading = self._loading
        if loading is None or not loading.is_over:
            return
        self._loading = None
        if isinstance(loading.outcome, NextDraft):
            self._install(loading.outcome)
        else:
            logger.error("draft refused reason=%r", loading.outcome)
            self._change(DraftState.REFUSED, loading.outcome)
            self._status = replace(self._status, num_refused=self._status.num_refused + 1)

    def limit(self, topology: TreeTopology) -> TreeTopology:
        """Return the tree of the next step: plain decoding where the draft is given up."""
        return self._scheduler.root_only if self._status.is_off else topology

    def forgive(self) -> None:
        """Judge the draft by what comes from now on."""
        self._window = _Window()

    def observe(self, stats: StepStats) -> None:
        """Count a collected step, and give up a draft that raised, or of whose tokens hardly any is right."""
        if self._site.failure and not self._status.is_off:
            self._give_up(DraftState.BROKEN, self._site.failure)
        if self._num_foreign:
            self._num_foreign -= 1
            return
        num_trees = num_drafted = num_accepted = 0
        for row in stats.rows:
            num_rows = row.num_rows
            num_trees += num_rows * (row.topology.num_drafts > 0)
            num_drafted += num_rows * row.topology.num_drafts
            num_accepted += num_rows * row.num_accepted
        status = self._status
        self._status = replace(
            status,
            num_drafts=status.num_drafts + num_trees,
            num_drafted=status.num_drafted + num_drafted,
            num_accepted=status.num_accepted + num_accepted,
        )
        self._window = window = self._window.after(num_trees, num_accepted)
        if window.is_full:
            if window.num_accepted < _LEAST_ACCEPTED and not self._status.is_off:
                text = f"{window.num_trees} trees had {window.num_accepted} draft tokens accepted"
                self._give_up(DraftState.COLLAPSED, f"{text}: the draft does not belong to this model")
            self.forgive()

    def _install(self, draft: NextDraft) -> None:
        self._num_foreign = self._scheduler.num_in_flight
        self.forgive()
        # Blocks without draft K/V would hold down the acceptance of every prompt that hits them.
        self._site.install(draft, self._scheduler.forget_draft())
        before, status = self._status.digest, self._status
        self._status = DraftStatus(
            draft.digest,
            DraftState.SERVING,
            num_swaps=status.num_swaps + 1,
            num_refused=status.num_refused,
        )
        logger.info("draft swapped from=%s to=%s", before, draft.digest)

    def _give_up(self, state: DraftState, reason: str) -> None:
        logger.error("speculation off digest=%s state=%s reason=%r", self._status.digest, state, reason)
        self._change(state, reason)
        self._status = replace(self._status, is_off=True)

    def _change(self, state: DraftState, message: str = "") -> None:
        self._status = replace(self._status, state=state, message=message)


class _Loading:
    """Reads one draft in a thread of its own; `outcome` is the draft, or why there is none, once it
    `is_over`.
    """

    def __init__(
        self, site: DraftSite, folder: Path, digest: str | None, model_digest: str, num_siblings: int
    ) -> None:
        self.outcome: NextDraft | str = "it was not read"
        self._site, self._folder = site, folder
        self._wanted = (digest, model_digest, num_siblings)
        self._thread = threading.Thread(target=self._run, name="draft-loader", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.outcome = self._site.load(self._folder, *self._wanted)
        except EyasError as error:
            self.outcome = str(error)
        except Exception as error:  # the thread's edge: of a device without memory, say
            logger.exception("draft not loaded folder=%s", self._folder)
            self.outcome = f"{type(error).__name__}: {error}"
