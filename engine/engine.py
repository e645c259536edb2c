"""The engine: the one loop that asks policy for a plan and the runner to execute it.

It speaks token ids only; text, HTTP and processes are left to its callers.
"""

import dataclasses
import logging
import time
from dataclasses import dataclass

from engine.batch import Load, SequenceDelta, StepPlan
from engine.config import EngineConfig
from engine.counters import Counters
from engine.dispatcher.dispatcher import Dispatcher
from engine.dispatcher.latency import LatencyTable
from engine.draft_swap import DraftSwap
from engine.errors import AdmissionError
from engine.kvcache.kv_cache import KVCache
from engine.policy import build_policy
from engine.request import FinishReason, Request, Sequence
from engine.request_check import check_request
from engine.runner.runner import ModelRunner
from engine.runner.step_handle import StepHandle
from engine.runner.worker import Worker, build_worker
from engine.scheduler.scheduler import Scheduler
from engine.stats import EngineFacts, EngineStats
from engine.step_stats import StepStats
from engine.step_times import measure_latency

logger = logging.getLogger(__name__)

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads consecutive numbers over all 64 bits


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A launched step and what it was launched with."""

    handle: StepHandle
    plan: StepPlan
    load: Load


class Engine:
    """Add requests, then call `step` while `has_work`.

    Each call launches one step and returns what the step before it gave: the host is one step late on every
    device.
    """

    def __init__(
        self,
        runner: ModelRunner,
        kv_cache: KVCache,
        scheduler: Scheduler,
        dispatcher: Dispatcher,
        facts: EngineFacts,
        seed: int,
    ) -> None:
        self.facts = facts
        self._runner, self._kv_cache = runner, kv_cache
        self._scheduler, self._dispatcher = scheduler, dispatcher
        self._seed = seed
        self._num_arrived = 0
        self._in_flight: _InFlight | None = None
        self._counters = Counters()
        self.drafts = DraftSwap(runner.draft_site, scheduler, facts.model_digest, facts.draft_digest)

    @staticmethod
    def load(config: EngineConfig) -> "Engine":
        """Build an engine from what `config` names. Raises `ModelLoadError` or `ConfigError`."""
        worker = build_worker(config)
        engine = assemble_engine(config, worker, latency=measure_latency(config, worker))
        engine.prepare()
        logger.info("engine ready %s", engine.facts)
        return engine

    def prepare(self) -> None:
        """Capture what the dispatcher can ask for, plain decoding, and prefills, where the device can."""
        max_rows = self.facts.max_num_seqs
        off = (self._scheduler.root_only, range(1, max_rows + 1))
        for topology, num_rows in (*self._dispatcher.reachable(max_rows), off):
            self._runner.capture(topology, num_rows)
        self._runner.prefill.capture(self.facts.max_batched_tokens)

    def capture(self, tree: str, num_rows: int) -> None:
        """Capture steps of up to `num_rows` rows over a tree. Raises `ConfigError` for an unknown name."""
        self._runner.capture(self._scheduler.library.get(tree), range(1, num_rows + 1))

    @property
    def has_work(self) -> bool:
        """True while a sequence is unfinished or a step has not been collected."""
        return self._scheduler.has_work or self._in_flight is not None

    def add(self, request: Request) -> None:
        """Queue a request. Raises `RequestError` where it can never be served, `CapacityError` where not
        now.
        """
        check_request(request, self.facts)
        self._runner.guides.check(request.sampling)
        seed = request.sampling.seed
        if seed is None:
            unsigned = self._seed + self._num_arrived * _GOLDEN
            seed = (unsigned + 2**63) % 2**64 - 2**63  # as a signed 64-bit integer
        self._scheduler.add(Sequence(request, seed, self._num_arrived))
        self._num_arrived += 1
        self._counters.num_prompt_tokens += len(request.prompt_token_ids)

    def abort(self, request_id: str, is_finished: bool = False) -> bool:
        """End a request now, its blocks free at once; False where it is unknown or has ended.

        `is_finished` says that its answer is whole, as after a stop string: it counts as finished.
        """
        reason = FinishReason.STOP if is_finished else FinishReason.ABORT
        sequence = self._scheduler.abort(request_id, reason)
        if sequence is not None:
            self._counters.count_end(reason, sequence.num_prefix_hits)
        return sequence is not None

    def step(self) -> tuple[SequenceDelta, ...]:
        """Launch one step if anything can run, then return what the step before it gave."""
        self.drafts.settle()
        load = self._scheduler.next_load()
        plan = self._scheduler.schedule(self.drafts.limit(self._dispatcher.choose(load)), time.monotonic())
        launched, failed = (None, []) if plan is None else self._launch(plan, load)
        deltas = () if self._in_flight is None else self._collect(self._in_flight)
        self._in_flight = launched
        return (*failed, *deltas)

    def stats(self) -> EngineStats:
        """Return counters since the start and gauges now. A draft that is ready is taken first."""
        self.drafts.settle()
        stats = self._counters.snapshot(
            self._scheduler.load(), self._kv_cache.pool.counts(), self._scheduler.num_preemptions
        )
        return dataclasses.replace(stats, dispatch=self._dispatcher.stats(), draft=self.drafts.status)

    def switch_speculation(self, mode: str) -> None:
        """Use another speculation mode from now on. Raises `ConfigError` for an unknown tree."""
        self._dispatcher.switch(mode)
        self.drafts.forgive()
        logger.info("speculation switched mode=%s", mode)

    def _launch(self, plan: StepPlan, load: Load) -> tuple[_InFlight | None, list[SequenceDelta]]:
        """Launch a step without the sequences that cannot take their slots, and return how those end."""
        failed: list[SequenceDelta] = []
        while not plan.is_empty:
            try:
                return _InFlight(self._runner.launch(plan), plan, load), failed
            except AdmissionError as error:
                plan, delta = self._scheduler.refuse_admission(plan, error.slot)
                logger.exception("admission failed request_id=%s", delta.request_id)
                self._counters.count_end(FinishReason.ERROR, delta.num_prefix_hits)
                failed.append(delta)
        return None, failed

    def _collect(self, flight: _InFlight) -> tuple[SequenceDelta, ...]:
        result = flight.handle.collect()
        deltas = self._scheduler.commit(result)
        stats = StepStats.of(flight.plan, flight.load, result)
        self._dispatcher.observe(stats)
        self._counters.observe(stats, deltas)
        self.drafts.observe(stats)
        return deltas


def assemble_engine(
    config: EngineConfig, worker: Worker, kv_cache: KVCache | None = None, latency: LatencyTable | None = None
) -> Engine:
    """Wire a runner to its policy. A `kv_cache` that is given has as many blocks as the runner's facts say.

    With a `latency` table of this machine the dispatcher learns, beginning with the worker's profile.
    """
    policy = build_policy(config, worker, kv_cache, latency)
    return Engine(
        worker.runner, policy.kv_cache, policy.scheduler, policy.dispatcher, worker.facts, config.seed
    )
