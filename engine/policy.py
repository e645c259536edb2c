"""The host side of an engine put together: cache bookkeeping, scheduler and dispatcher of one config.

What each decides is left to them.
"""

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.dispatcher.create import create_dispatcher
from engine.dispatcher.dispatcher import Dispatcher
from engine.dispatcher.latency import LatencyTable
from engine.dispatcher.static import StaticDispatcher
from engine.kvcache.block_pool import BlockPool
from engine.kvcache.kv_cache import KVCache
from engine.runner.worker import Worker
from engine.scheduler.scheduler import Scheduler, SchedulerConfig


@dataclass(frozen=True, slots=True)
class Policy:
    """All that decides what a step holds."""

    kv_cache: KVCache
    scheduler: Scheduler
    dispatcher: Dispatcher


def build_policy(
    config: EngineConfig, worker: Worker, kv_cache: KVCache | None, latency: LatencyTable | None
) -> Policy:
    """Return the policy for what the machine answered; see `assemble_engine`."""
    library, facts = worker.library, worker.facts
    if kv_cache is None:
        kv_cache = KVCache(BlockPool(facts.num_blocks + 1, facts.block_size), config.enable_prefix_cache)
    scheduler_config = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_waiting=config.max_num_waiting,
        max_batched_tokens=facts.max_batched_tokens,
        max_model_len=facts.max_model_len,
        eos_token_ids=frozenset(facts.eos_token_ids),
        draft_window=config.speculation.feature_window,
    )
    table = config.device_sizes(facts.device.startswith("cuda")).table
    dispatcher = create_dispatcher(
        config.speculation,
        StaticDispatcher(config.speculation, table, library),
        library,
        latency,
        worker.profile,
        block_size=facts.block_size,
        max_num_seqs=config.max_num_seqs,
    )
    return Policy(kv_cache, Scheduler(scheduler_config, kv_cache, library), dispatcher)
