"""`eyas rollout`: wires a rollout to its replicas, its registry and its state, and says how it ended.

What a rollout does is left to `controller`.
"""

import argparse
import os
import time
from pathlib import Path
from typing import TextIO

from engine import cache_folder, resolve_model
from ops.registry.registry import Registry
from ops.rollout.analysis import Limits
from ops.rollout.candidates import RegistryDrafts
from ops.rollout.controller import Controller, Pace
from ops.rollout.dashboard import Dashboard, fetch
from ops.rollout.serve_target import ConfigSource, ServeTarget
from ops.rollout.state import Phase, RolloutState
from ops.rollout.state_store import FileStore, StateStore

TOKEN_VARIABLE = "RAY_AUTH_TOKEN"  # noqa: S105 - the name that Ray gives it
EXIT_NOT_PROMOTED, EXIT_PAUSED = 3, 4
_ENDS = {Phase.SUCCEEDED: 0, Phase.PAUSED: EXIT_PAUSED}


class SystemClock:
    """See `Clock`."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Run one of the commands; start, promote and abort return when the rollout is over or paused."""
    store, source = connect(options)
    if options.action == "status":
        kept = store.load()
        out.write("no rollout\n" if kept is None else describe(kept.state))
        return 0
    registry = Registry(options.registry or str(cache_folder() / "registry"))
    drafts = RegistryDrafts(
        registry, resolve_model(options.model), cache_folder() / "fetched", options.replica_registry
    )
    target = ServeTarget(source, lambda: fetch(f"{options.server.rstrip('/')}/metrics"))
    limits = Limits(margin=options.margin, time_margin=options.time_margin, max_looks=options.looks)
    pace = Pace(
        window_s=options.window,
        windows_per_look=options.windows,
        follow_s=options.follow,
        num_canaries=options.canaries,
    )
    controller = Controller(store, target, drafts, SystemClock(), limits, pace)
    if options.action == "start":
        controller.start(registry.get(options.draft).id)
    else:
        controller.ask(Phase.PROMOTING if options.action == "promote" else Phase.ROLLING_BACK)
    state = controller.run()
    out.write(describe(state))
    if options.action == "abort" and state.phase is Phase.ROLLED_BACK:
        return 0
    return _ENDS.get(state.phase, EXIT_NOT_PROMOTED)


def connect(options: argparse.Namespace) -> tuple[StateStore, ConfigSource]:
    """Return where the rollout is kept, and where the Serve configuration is."""
    if options.ray_service is None:
        path = Path(options.state) if options.state else cache_folder() / "rollout.json"
        return FileStore(path), Dashboard(options.dashboard, os.environ.get(TOKEN_VARIABLE))
    from ops.rollout.cluster import ConfigMapStore, RayService
    from ops.rollout.cluster import connect as connect_cluster

    api = connect_cluster(options.kubeconfig)
    return (
        ConfigMapStore(api, options.namespace),
        RayService(api, options.namespace, options.ray_service),
    )


def describe(state: RolloutState) -> str:
    """Return what a person wants to know: the phase first, then how it came to it."""
    lines = [
        f"{state.phase}: {state.reason}" if state.reason else str(state.phase),
        f"  draft {state.draft}",
        f"  stable {state.stable.digest}, candidate {state.candidate.digest}",
        f"  canary {', '.join(state.canary) or 'not chosen yet'}; {state.num_looks} looks",
        *(f"  {step}" for step in state.history),
    ]
    return "\n".join([*lines, ""])
