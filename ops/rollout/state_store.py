"""Where the state of a rollout is kept, changed by compare-and-swap; a file here.

A ConfigMap is in `config_map`. What is kept is left to `state`.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ops.rollout.state import RolloutError, RolloutState, parse_state


class ConflictError(RolloutError):
    """Somebody else has changed the state since it was read."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A state and the version that a change of it must name."""

    state: RolloutState
    version: str


class StateStore(Protocol):
    """Holds at most one rollout, the last one."""

    def load(self) -> Kept | None:
        """Return what is kept, None where nothing was yet."""
        ...

    def replace(self, state: RolloutState, version: str | None) -> Kept:
        """Keep `state` where `version` is still the kept one, None for nothing; it has survived when this
        returns. Raises `ConflictError`.
        """
        ...


class FileStore:
    """A file, replaced whole. Processes of one machine may share it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> Kept | None:
        try:
            values = json.loads(self._path.read_text(encoding="utf-8"))
            return Kept(parse_state(json.dumps(values["state"])), str(int(values["version"])))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RolloutError(f"cannot read {self._path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise RolloutError(f"{self._path} is no state of a rollout: {error!r}") from error

    def replace(self, state: RolloutState, version: str | None) -> Kept:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                kept = self.load()
                found = None if kept is None else kept.version
                if found != version:
                    raise ConflictError(f"the rollout in {self._path} was changed by another process")
                new = "1" if found is None else str(int(found) + 1)
                self._write(json.dumps({"version": new, "state": json.loads(state.to_json())}, indent=2))
        except OSError as error:
            raise RolloutError(f"cannot write {self._path}: {error.strerror}") from error
        return Kept(state, new)

    def _write(self, text: str) -> None:
        beside = self._path.with_suffix(".new")
        with beside.open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The system gives the lock back when its holder dies."""
        with self._path.with_suffix(".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
