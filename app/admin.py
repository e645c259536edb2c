"""The body of `/admin/status`: what every replica has loaded and how far a change of it is.

It is for operators inside the cluster; keeping the path from the outside is left to the gateway.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from app.metrics import ReplicaSnapshot


def status_body(replicas: Sequence[ReplicaSnapshot], configuration: dict[str, Any]) -> dict[str, Any]:
    """Return plain JSON values."""
    return {"configuration": configuration, "replicas": [_replica(replica) for replica in replicas]}


def _replica(replica: ReplicaSnapshot) -> dict[str, Any]:
    facts, stats, live = replica.facts, replica.stats, replica.live
    return {
        "replica": replica.replica,
        "version": replica.version,
        "model": {"name": facts.model_name, "folder": facts.model_folder, "digest": facts.model_digest},
        "draft": asdict(stats.draft),
        "live": None
        if live is None
        else {
            "wanted": live.config.model_dump(),
            "is_fetching": live.is_fetching,
            "refusals": dict(live.refusals),
        },
        "arms": {"known": list(facts.trees), "rows": dict(stats.steps_by_tree)},
        "dispatch": {name: value for name, value in asdict(stats.dispatch).items() if name != "state"},
        "memory": {
            "block_size": facts.block_size,
            "num_blocks": facts.num_blocks,
            "num_free": stats.num_free_blocks,
            "num_held": stats.num_held_blocks,
            "num_cached": stats.num_cached_blocks,
            "max_model_len": facts.max_model_len,
            "max_num_seqs": facts.max_num_seqs,
            "max_batched_tokens": facts.max_batched_tokens,
        },
        "engine": {
            "dtype": facts.dtype,
            "device": facts.device,
            "attention_backend": facts.attention_backend,
            "num_threads": facts.num_threads,
        },
        "ready_seconds": asdict(replica.ready) | {"total": replica.ready.total},
        "requests": {"running": stats.num_running, "waiting": stats.num_waiting},
    }
