"""The router that Serve runs in every ingress: our ranking behind Serve's protocol.

What is ranked how is left to `routing`.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from app.call import ChatCall, CompletionCall
from app.routing import Candidate, PrefixTable, prefix_keys, rank


class PrefixLoadRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types here
    """Ranks replicas for each call by what they know of its prompt and by their load.

    The figures of `record_routing_stats` are some seconds old; calls that this router sent meanwhile are
    counted beside them.
    """

    def initialize_state(self, **_: Any) -> None:
        """Begin without any knowledge; Serve calls it once."""
        self._prefixes = PrefixTable()
        self._ongoing: Counter[str] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas one by one, best first."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        stats = {name: replica.routing_stats or {} for name, replica in by_name.items()}
        # A replica that has not spoken yet is taken for as able as the others.
        usual = max((figures.get("capacity", 1.0) for figures in stats.values()), default=1.0)
        candidates = [
            Candidate(name, self._num_ongoing(name, figures), figures.get("capacity", usual))
            for name, figures in stats.items()
        ]
        matched = self._prefixes.match(_keys_of(pending_request))
        return [[by_name[name]] for name in rank(candidates, matched)]

    def on_request_routed(
        self,
        pending_request: PendingRequest,
        replica_id: ReplicaID,
        result: ReplicaResult,  # noqa: ARG002 - Serve's signature
    ) -> None:
        """Remember where a prompt went; Serve calls it."""
        self._ongoing[replica_id.unique_id] += 1
        self._prefixes.observe(_keys_of(pending_request), replica_id.unique_id)

    def on_request_completed(
        self,
        replica_id: ReplicaID,
        internal_request_id: str,  # noqa: ARG002 - Serve's signature
    ) -> None:
        """Forget a call; Serve calls it however it ended."""
        self._ongoing[replica_id.unique_id] -= 1
        if self._ongoing[replica_id.unique_id] <= 0:
            del self._ongoing[replica_id.unique_id]

    def _num_ongoing(self, name: str, figures: Mapping[str, float]) -> float:
        """Return the calls in flight, whoever sent them."""
        return max(figures.get("num_running", 0.0) + figures.get("num_waiting", 0.0), self._ongoing[name])


def _keys_of(request: PendingRequest | None) -> tuple[bytes, ...]:
    """Return the keys of the call inside a request; none of health checks and the like."""
    call = request.args[0] if request is not None and request.args else None
    return prefix_keys(call) if isinstance(call, ChatCall | CompletionCall) else ()
