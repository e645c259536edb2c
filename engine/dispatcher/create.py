"""The dispatcher that a config asks for on this machine. What dispatchers do is left to them."""

import math

from engine.config import SpeculationConfig
from engine.dispatcher.adaptive import AdaptiveDispatcher
from engine.dispatcher.arms import select_arms
from engine.dispatcher.dispatcher import Dispatcher
from engine.dispatcher.latency import LatencyTable
from engine.dispatcher.static import StaticDispatcher
from engine.tree.library import TreeLibrary
from engine.tree.search import Profile


def create_dispatcher(
    config: SpeculationConfig,
    static: StaticDispatcher,
    library: TreeLibrary,
    table: LatencyTable | None,
    profile: Profile,
    *,
    block_size: int,
    max_num_seqs: int,
) -> Dispatcher:
    """Return the dispatcher that learns, where steps were timed and trees can be drafted, else the static
    one.

    It knows every mode, so that a switch can reach "auto" from any.
    """
    if table is None or not library.max_depth:
        return static
    trees = [library.get(name) for name in table.names]
    dispatcher = AdaptiveDispatcher(
        select_arms(trees, profile, table),
        table,
        profile,
        static,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_step_seconds=math.inf if config.max_step_seconds is None else config.max_step_seconds,
    )
    dispatcher.switch(config.mode)
    return dispatcher
