"""The state of a rollout as it is kept: plain data that any process can take up where another was killed.

Keeping it is left to the stores, changing it to `controller`.
"""

import dataclasses
import enum
import json
from dataclasses import dataclass, field
from typing import Any

from engine import EyasError


class RolloutError(EyasError):
    """A rollout cannot begin or go on: it says why and what to do."""


class Phase(enum.StrEnum):
    """Where a rollout is. Each is written before what it does is done."""

    VERIFYING = "verifying"  # the candidate is read and loaded as a server would
    PREFETCHING = "prefetching"  # it is brought to a folder that replicas see
    CANARY = "canary"  # the named replicas are asked to load it
    WATCHING = "watching"  # both drafts serve, and are compared
    PAUSED = "paused"  # no verdict: a person promotes or aborts
    PROMOTING = "promoting"  # all replicas are asked to load it
    ROLLING_BACK = "rolling-back"  # all replicas are asked to go back
    SUCCEEDED = "succeeded"
    ROLLED_BACK = "rolled-back"
    FAILED = "failed"  # refused before any replica saw it


TERMINAL = frozenset({Phase.SUCCEEDED, Phase.ROLLED_BACK, Phase.FAILED})


@dataclass(frozen=True, slots=True)
class DraftRef:
    """What a server's configuration says of a draft: its folder, None for the one it was started with, and
    the digest of its weights, None where nothing is loaded.
    """

    folder: str | None
    digest: str | None


@dataclass(frozen=True, slots=True)
class RolloutState:
    """One rollout. `draft` is the candidate's id in the registry; `reason` says what led to the phase."""

    draft: str
    phase: Phase
    stable: DraftRef
    candidate: DraftRef
    canary: tuple[str, ...] = ()  # replicas
    num_looks: int = 0
    reason: str = ""
    history: tuple[str, ...] = field(default=())

    def to(self, phase: Phase, reason: str, **changes: Any) -> "RolloutState":
        """Return the state in its next phase, with the one before in its history."""
        step = f"{self.phase} -> {phase}: {reason}"
        return dataclasses.replace(self, phase=phase, reason=reason, history=(*self.history, step), **changes)

    @property
    def is_over(self) -> bool:
        return self.phase in TERMINAL

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def parse_state(text: str) -> RolloutState:
    """Read a state. Raises `RolloutError` where it is none."""
    try:
        values = json.loads(text)
        values["phase"] = Phase(values["phase"])
        for name in ("stable", "candidate"):
            values[name] = DraftRef(**values[name])
        for name in ("canary", "history"):
            if not isinstance(values[name], list):
                raise TypeError(f"{name} is {values[name]!r}")
            values[name] = tuple(values[name])
        state = RolloutState(**values)
        _check_types(state)
        return state
    except (ValueError, KeyError, TypeError) as error:
        raise RolloutError(f"the kept state of the rollout is corrupt: {error!r}") from error


def _check_types(state: RolloutState) -> None:
    """Raise `TypeError` where JSON of the right names has other values: a rollout would break on them
    later.
    """
    drafts = (state.stable, state.candidate)
    places = [text for draft in drafts for text in (draft.folder, draft.digest) if text is not None]
    for text in (state.draft, state.reason, *state.canary, *state.history, *places):
        if not isinstance(text, str):
            raise TypeError(f"expected text, found {text!r}")
    if type(state.num_looks) is not int:
        raise TypeError(f"num_looks is {state.num_looks!r}")
