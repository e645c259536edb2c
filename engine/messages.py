"""What the engine core process and its client say to each other, as plain picklable data.

Carrying the messages is left to `core` and `async_engine`.
"""

from dataclasses import dataclass
from pathlib import Path

from engine.batch import SequenceDelta
from engine.request import Request
from engine.stats import EngineFacts, EngineStats


@dataclass(frozen=True, slots=True)
class Add:
    """Client: queue a request. Answered by `Refused` or by deltas."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """Client: end a request. Not answered; deltas may still be on their way. `is_finished` says that its
    answer is whole, as after a stop string, which is not for the core to know.
    """

    request_id: str
    is_finished: bool = False


@dataclass(frozen=True, slots=True)
class AskStats:
    """Client: answered by one `EngineStats`."""


@dataclass(frozen=True, slots=True)
class LoadDraft:
    """Client: draft with the head of `folder`, of weights `digest` if given. `EngineStats` tells the
    outcome.
    """

    folder: Path
    digest: str | None


@dataclass(frozen=True, slots=True)
class Switch:
    """Client: use another speculation mode from now on, one that the engine knows. Not answered."""

    mode: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Client: end the process. Closing the connection says the same."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Core, first message: it serves."""

    facts: EngineFacts


@dataclass(frozen=True, slots=True)
class Failed:
    """Core, first message: it could not start; or last message: it ends with an error nobody foresaw."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Refused:
    """Core: a request was not queued. For `num_added` see `Deltas`."""

    request_id: str
    error: Exception
    num_added: int


@dataclass(frozen=True, slots=True)
class Deltas:
    """Core, after every step: what it gave, all rows in one message; none is a sign of life.

    `num_added` counts the `Add`s that the core had read. A delta belongs to the last request of its name
    among those, never to one added later.
    """

    deltas: tuple[SequenceDelta, ...]
    num_added: int

    def __reduce__(self) -> tuple[object, ...]:
        """Travel by columns: pickle would ask every delta how it is to be copied."""
        return _deltas, (tuple(zip(*self.deltas, strict=True)), self.num_added)


def _deltas(columns: tuple[tuple[object, ...], ...], num_added: int) -> Deltas:
    return Deltas(tuple(map(SequenceDelta._make, zip(*columns, strict=True))), num_added)


ClientMessage = Add | Abort | AskStats | LoadDraft | Switch | Shutdown
CoreMessage = Ready | Failed | Refused | Deltas | EngineStats
