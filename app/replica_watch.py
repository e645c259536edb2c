"""What an operator is told while replicas fail and come back: one line per change.

Asking Serve how many run is left to `cli_serve`, replacing them to Serve.
"""


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
