"""One replica: a server, its engine, and what Serve asks of them besides calls.

Ray is not known here; answering calls is left to `server`.
"""

import asyncio
import itertools
import logging
import time
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any

from app.chat import ChatTemplate
from app.choices import Limits
from app.config import ServerConfig
from app.live import LiveControl
from app.message_pace import MessagePace
from app.metrics import ReplicaSnapshot
from app.ready import ReadyTimes
from app.replica_load import LoadMeter
from app.server import LLMServer
from app.tokenizer import Tokenizer
from engine import AsyncEngine, GrammarCompiler, Request, SamplingParams

logger = logging.getLogger(__name__)


class Replica:
    """Made by `start`. Autoscaling and routing look at the load at times of their own, so each has a
    meter.
    """

    def __init__(
        self, server: LLMServer, engine: AsyncEngine, live: LiveControl, objective_s: float, ready: ReadyTimes
    ) -> None:
        self.server, self._engine, self.live, self._ready = server, engine, live, ready
        self._scaling = LoadMeter(objective_s, engine.facts.max_num_seqs)
        self._routing = LoadMeter(objective_s, engine.facts.max_num_seqs)

    @staticmethod
    async def start(config: ServerConfig, name: str = "local") -> "Replica":
        """Fetch the model where it is absent, start the engine and let it emit one token. Raises
        `ModelLoadError`, `ConfigError`.
        """
        logger.info("configuration %s", config.model_dump_json())
        times = [time.monotonic()]
        engine_config = await asyncio.to_thread(config.engine_config)
        tokenizer, template = Tokenizer(engine_config.model), ChatTemplate(engine_config.model)
        times.append(time.monotonic())
        engine = await AsyncEngine.start(engine_config)
        times.append(time.monotonic())
        await _emit_one_token(engine)
        times.append(time.monotonic())
        model, core, first_token = (end - start for start, end in itertools.pairwise(times))
        load = engine.facts.load_seconds
        limits = Limits(engine_config.max_num_waiting, config.max_prompt_tokens, config.max_concurrent_calls)
        sink = config.tracing.open_export(name)
        facts = engine.facts
        compiler = GrammarCompiler(
            engine_config.model, facts.vocab_size, facts.eos_token_ids, facts.model_digest
        )
        server = LLMServer(
            engine,
            tokenizer,
            template,
            config.name,
            limits,
            name,
            sink=sink,
            compiler=compiler,
            pace=MessagePace(config.messages_per_second),
        )
        return Replica(
            server,
            engine,
            LiveControl(engine, config, limits, server.limit, replica=name),
            config.autoscaling.time_per_token_s,
            ReadyTimes(model, load, max(0.0, core - load), first_token),
        )

    async def snapshot(self) -> ReplicaSnapshot:
        snapshot = await self.server.snapshot()
        return replace(snapshot, ready=self._ready, live=self.live.status())

    async def scaling_figures(self) -> dict[str, float]:
        """Return what `autoscaling.ReplicaFigures` holds."""
        load = self._scaling.observe(await self._engine.stats())
        return {
            "num_running": float(load.num_running),
            "num_waiting": float(load.num_waiting),
            "waiting_tokens": load.waiting_tokens,
            "kv_use": load.kv_use,
            "capacity": load.capacity,
            "ready_seconds": self._ready.total,
        }

    async def routing_figures(self) -> dict[str, Any]:
        """Return what the router ranks replicas by."""
        return asdict(self._routing.observe(await self._engine.stats()))

    async def shutdown(self) -> None:
        self.live.close()
        await self.server.shutdown()


async def _emit_one_token(engine: AsyncEngine) -> None:
    """Run the first step, which compiles and warms, before a client waits for it. A core that fails it
    ends.
    """
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    try:
        async with aclosing(engine.generate(Request("first-token", (0,), sampling))) as deltas:
            async for _ in deltas:
                pass
    except BaseException:  # cancellation too: nobody else knows of the process yet
        await engine.shutdown()
        raise
