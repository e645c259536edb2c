"""What a rollout asks of a fleet of replicas, and what it sees of them.

How either is done is left to `serve_target`; tests have a fleet of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ops.rollout.state import DraftRef


@dataclass(frozen=True, slots=True)
class Replica:
    """One running replica: the weights in place, whether it gave them up and decodes plainly, and its
    counters since it started; `num_refusals` are drafts that it could not load.
    """

    name: str
    digest: str | None
    is_off: bool
    seconds: float
    steps: int
    calls: int
    tokens: int
    num_refusals: int = 0


@dataclass(frozen=True, slots=True)
class Desired:
    """Which draft each replica must load: `canary` ones `candidate`, all others `stable`."""

    stable: DraftRef
    candidate: DraftRef | None = None
    canary: tuple[str, ...] = ()


class Target(Protocol):
    """A fleet. Both methods raise `RolloutError` where it cannot be reached."""

    def observe(self) -> Sequence[Replica]:
        """Return all running replicas."""
        ...

    def apply(self, desired: Desired) -> None:
        """Ask for `desired`; asking twice changes nothing. Replicas load when they can."""
        ...

    def stable(self) -> str | None:
        """Return the folder of the draft that is asked for now, None for the one of the start."""
        ...
