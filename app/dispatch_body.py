"""The body of `/admin/dispatcher`: which tree each replica drafts, why, and what its arms realised.

Wording it is left to `cli_trees`.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from app.metrics import ReplicaSnapshot

DISPATCHER = "/admin/dispatcher"


def dispatch_body(replicas: Sequence[ReplicaSnapshot]) -> dict[str, Any]:
    """Return plain JSON values; `state` is what `eyas trees explain` reads, null where nothing is learnt."""
    return {"replicas": [_replica(replica) for replica in replicas]}


def _replica(replica: ReplicaSnapshot) -> dict[str, Any]:
    dispatch = replica.stats.dispatch
    state = None if dispatch.state is None else json.loads(dispatch.state)
    return {"replica": replica.replica, "model": replica.model, **asdict(dispatch), "state": state}
