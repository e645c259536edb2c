"""What an operator is told while replicas fail and come back: one line per change.

Asking Serve how many run is left to `cli_serve`, replacing them to Serve.
"""

from typing import Protocol


class Watch(Protocol):
    """Compares counts of running replicas."""

    def observe(self, num_running: int) -> str | None:
        """Return the line for a change since the last call, None where nothing changed."""


class ScaledReplicaWatch:
    """Tells how many replicas run where their number is meant to change."""

    def __init__(self, num_replicas: int) -> None:
        self._num_running = num_replicas

    def observe(self, num_running: int) -> str | None:
        """See `Watch.observe`."""
        before, self._num_running = self._num_running, num_running
        return None if num_running == before else f"{num_running} server replicas run, {before} before"


class ReplicaWatch:
    """Compares counts of running replicas; `log_folder` is where their own words are."""

    def __init__(self, num_replicas: int, log_folder: str) -> None:
        self._num_replicas = num_replicas
        self._log_folder = log_folder
        self._num_running = num_replicas

    def observe(self, num_running: int) -> str | None:
        """Return the line for a change since the last call, None where nothing changed."""
        before, self._num_running = self._num_running, num_running
        if num_running < before:
            return (
                f"{before - num_running} of {self._num_replicas} server replicas failed and will be "
                f"replaced; the reason is in {self._log_folder}"
            )
        if num_running > before:
            return f"{num_running} of {self._num_replicas} server replicas serve again"
        return None
