"""Brings a rollout to its end, phase by phase: it acts, waits until the fleet has followed, and keeps the
next phase before it acts on that.

What it decides is in `analysis`, what it keeps in `state`; the fleet and the drafts are behind protocols. It
may be killed at any line: what a phase does can be done again, so whoever loads the state goes on from there.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from engine import EyasError
from ops.rollout.analysis import Analysis, Limits, Verdict, judge
from ops.rollout.observation import Windows, canary_problems, new_refusals
from ops.rollout.state import DraftRef, Phase, RolloutError, RolloutState
from ops.rollout.state_store import ConflictError, Kept, StateStore
from ops.rollout.target import Desired, Replica, Target

logger = logging.getLogger(__name__)
T = TypeVar("T")

_ABORTABLE = frozenset(
    {Phase.VERIFYING, Phase.PREFETCHING, Phase.CANARY, Phase.WATCHING, Phase.PAUSED, Phase.PROMOTING}
)
_PROMOTABLE = frozenset({Phase.WATCHING, Phase.PAUSED})


class Drafts(Protocol):
    """The candidates by their ids. Each may be asked again, and raises `EyasError`."""

    def digest(self, draft: str) -> str:
        """Return the sha256 of the weights."""
        ...

    def verify(self, draft: str) -> None:
        """Read and load the draft as a server would."""
        ...

    def fetch(self, draft: str) -> str:
        """Return a folder that all replicas see."""
        ...

    def mark_stable(self, draft: str) -> None:
        """Remember that it serves."""
        ...


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds between two looks at the fleet, of a window, and that replicas may take to follow."""

    poll_s: float = 1.0
    window_s: float = 10.0
    windows_per_look: int = 6
    follow_s: float = 300.0
    num_canaries: int = 1


class Clock(Protocol):
    """Time, so that tests need not wait."""

    def now(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class Controller:
    """One rollout of one fleet. Several processes may run one: a change by another is taken up."""

    def __init__(
        self, store: StateStore, target: Target, drafts: Drafts, clock: Clock, limits: Limits, pace: Pace
    ) -> None:
        self._store, self._target, self._drafts = store, target, drafts
        self._clock, self._limits, self._pace = clock, limits, pace
        self._windows = Windows()
        self._seen: Sequence[Replica] = ()  # at the last look
        self._act: dict[Phase, Callable[[Kept], RolloutState]] = {
            Phase.VERIFYING: self._verify,
            Phase.PREFETCHING: self._prefetch,
            Phase.CANARY: self._start_canary,
            Phase.WATCHING: self._watch,
            Phase.PROMOTING: self._promote,
            Phase.ROLLING_BACK: self._roll_back,
        }

    def start(self, draft: str) -> RolloutState:
        """Keep a new rollout; `run` does the rest. One of the same draft that was killed is taken up.

        Raises `RolloutError` where another one runs or none can.
        """
        kept = self._store.load()
        if kept is not None and not kept.state.is_over:
            if kept.state.draft == draft:
                return kept.state
            raise RolloutError(
                f"a rollout of {kept.state.draft[:12]} is {kept.state.phase}: promote or abort it first"
            )
        replicas = self._target.observe()
        if len(replicas) <= self._pace.num_canaries:
            raise RolloutError(
                f"a canary of {self._pace.num_canaries} needs more replicas than that, found {len(replicas)}"
            )
        digests = {replica.digest for replica in replicas}
        if len(digests) > 1:
            raise RolloutError(f"replicas serve {len(digests)} different drafts: wait, or find out why")
        stable = DraftRef(self._target.stable(), digests.pop())
        candidate = DraftRef(None, self._drafts.digest(draft))
        if candidate.digest == stable.digest:
            raise RolloutError(f"draft {draft[:12]} serves already")
        state = RolloutState(draft, Phase.VERIFYING, stable, candidate)
        try:
            self._keep(state, None if kept is None else kept.version)
        except ConflictError:
            return self.start(draft)  # another process was quicker: its rollout is taken up, or told
        return state

    def ask(self, phase: Phase) -> RolloutState:
        """Send the rollout to PROMOTING or ROLLING_BACK; whoever runs it follows. Raises `RolloutError`."""
        kept = self._loaded()
        allowed = _PROMOTABLE if phase is Phase.PROMOTING else _ABORTABLE
        if kept.state.phase is not phase and kept.state.phase not in allowed:
            verb = "promoted" if phase is Phase.PROMOTING else "aborted"
            raise RolloutError(f"a rollout that is {kept.state.phase} cannot be {verb}")
        if kept.state.phase is not phase:
            return self._keep(kept.state.to(phase, "asked for"), kept.version).state
        return kept.state

    def run(self) -> RolloutState:
        """Go on with the kept rollout until it is over or paused. Raises `RolloutError`."""
        kept = self._loaded()
        while not kept.state.is_over and kept.state.phase is not Phase.PAUSED:
            try:
                following = self._act[kept.state.phase](kept)
                kept = self._keep(following, kept.version)
            except ConflictError:
                kept = self._loaded()
        return kept.state

    def _verify(self, kept: Kept) -> RolloutState:
        try:
            self._drafts.verify(kept.state.draft)
        except EyasError as error:
            return kept.state.to(Phase.FAILED, str(error))
        return kept.state.to(Phase.PREFETCHING, "the candidate is whole and fits the model")

    def _prefetch(self, kept: Kept) -> RolloutState:
        try:
            folder = self._drafts.fetch(kept.state.draft)
        except EyasError as error:
            return kept.state.to(Phase.FAILED, str(error))
        names = sorted(replica.name for replica in self._observe(kept))[: self._pace.num_canaries]
        return kept.state.to(
            Phase.CANARY,
            f"canary replicas {', '.join(names)}",
            candidate=replace(kept.state.candidate, folder=folder),
            canary=tuple(names),
        )

    def _start_canary(self, kept: Kept) -> RolloutState:
        state = kept.state

        def problems(replicas: Sequence[Replica]) -> tuple[str, ...]:
            return canary_problems(replicas, state.canary, state.candidate.digest)

        left = self._apply(kept, Desired(state.stable, state.candidate, state.canary), problems)
        if left:
            return state.to(Phase.ROLLING_BACK, f"error: {'; '.join(left)}")
        return state.to(Phase.WATCHING, "the canary drafts with the candidate")

    def _watch(self, kept: Kept) -> RolloutState:
        """Compare the drafts once more. A rollout that was killed begins with no windows, but no more
        looks.
        """
        state, before = kept.state, self._observe(kept)
        problems = canary_problems(before, state.canary, state.candidate.digest)
        for _ in range(self._pace.windows_per_look):
            if problems:
                break
            self._clock.sleep(self._pace.window_s)
            self._check_current(kept)
            after = self._observe(kept)
            self._windows = self._windows.extend(before, after, state.canary)
            problems = canary_problems(after, state.canary, state.candidate.digest)
            before = after
        analysis = judge(self._windows.candidate, self._windows.stable, problems, self._limits)
        return _after_look(state, analysis, state.num_looks + 1 >= self._limits.max_looks)

    def _promote(self, kept: Kept) -> RolloutState:
        state = kept.state
        left = self._apply(kept, Desired(state.candidate), _others(state.candidate.digest))
        if left:
            return state.to(Phase.ROLLING_BACK, f"error: {'; '.join(left)}")
        reason = "all replicas draft with the candidate"
        try:
            self._drafts.mark_stable(state.draft)
        except EyasError as error:  # they serve it all the same: a registry may be for reading only
            reason += f"; the registry does not know that it serves: {error}"
        return state.to(Phase.SUCCEEDED, reason)

    def _roll_back(self, kept: Kept) -> RolloutState:
        state = kept.state
        left = self._apply(kept, Desired(state.stable), _others(state.stable.digest), is_back=True)
        if left:
            raise RolloutError(f"rolling back: {'; '.join(left)}; run eyas rollout abort again")
        return state.to(Phase.ROLLED_BACK, state.reason)

    def _apply(
        self,
        kept: Kept,
        desired: Desired,
        problems: Callable[[Sequence[Replica]], tuple[str, ...]],
        *,
        is_back: bool = False,
    ) -> tuple[str, ...]:
        """Ask for `desired` and wait; return what is left of `problems` when the time is over, or, unless the
        fleet goes back, once a replica is seen to refuse a draft. A process that takes a rollout up after the
        refusal sees none, and waits.
        """
        self._check_current(kept)
        before = self._seen
        self._patiently(kept, lambda: self._target.apply(desired))
        deadline = self._clock.now() + self._pace.follow_s
        while left := problems(self._observe(kept)):
            before = before or self._seen
            # Replicas that go back may still be refusing the draft that they leave.
            refusals = () if is_back else new_refusals(before, self._seen)
            if refusals or self._clock.now() >= deadline:
                return (*left, *refusals)
            self._clock.sleep(self._pace.poll_s)
            self._check_current(kept)
        return ()

    def _observe(self, kept: Kept) -> Sequence[Replica]:
        self._seen = self._patiently(kept, self._target.observe)
        return self._seen

    def _patiently(self, kept: Kept, ask: Callable[[], T]) -> T:
        """Ask a fleet that cannot be reached again, as long as replicas may take to follow: while one of them
        is replaced, its page is that of none. A canary must not be left alone for that.
        """
        deadline = self._clock.now() + self._pace.follow_s
        while True:
            try:
                return ask()
            except RolloutError as error:
                if self._clock.now() >= deadline:
                    raise
                logger.warning("rollout asks again reason=%r", str(error))
            self._clock.sleep(self._pace.poll_s)
            self._check_current(kept)

    def _check_current(self, kept: Kept) -> None:
        if self._loaded().version != kept.version:
            raise ConflictError("the rollout was changed by another process")

    def _loaded(self) -> Kept:
        kept = self._store.load()
        if kept is None:
            raise RolloutError("there is no rollout: eyas rollout start")
        return kept

    def _keep(self, state: RolloutState, version: str | None) -> Kept:
        kept = self._store.replace(state, version)
        logger.info("rollout phase=%s draft=%s reason=%r", state.phase, state.draft[:12], state.reason)
        return kept


def _others(digest: str | None) -> Callable[[Sequence[Replica]], tuple[str, ...]]:
    """Return what finds the replicas that serve another draft; no replicas at all is a problem too."""

    def problems(replicas: Sequence[Replica]) -> tuple[str, ...]:
        if not replicas:
            return ("no replica runs",)
        return tuple(
            f"replica {replica.name} serves {replica.digest}"
            for replica in replicas
            if replica.digest != digest
        )

    return problems


def _after_look(state: RolloutState, analysis: Analysis, is_last: bool) -> RolloutState:
    num_looks = state.num_looks + 1
    reason = f"{analysis.verdict}: {analysis.reason}"
    if analysis.verdict is Verdict.PASS:
        return state.to(Phase.PROMOTING, reason, num_looks=num_looks)
    if analysis.verdict is not Verdict.INCONCLUSIVE:
        return state.to(Phase.ROLLING_BACK, reason, num_looks=num_looks)
    if is_last:
        return state.to(Phase.PAUSED, reason, num_looks=num_looks)
    return replace(state, num_looks=num_looks, reason=reason)
