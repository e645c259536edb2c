"""The Ray Serve application: an ingress in front of servers that own an engine each.

This, `request_router` and `cli_serve` are the only files that know Ray; what they place is in `ingress` and
`replica`.
"""

import asyncio
import logging
from collections.abc import Awaitable
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from app.api_keys import load_api_keys
from app.call import Call, Reply, TokenCall
from app.config import ServerConfig
from app.errors import NoReplicaError
from app.ingress import FrontDoor, Ingress, Messages
from app.metrics import ReplicaSnapshot
from app.replica import Replica
from app.server import ModelCard
from app.version import version
from engine import CapacityError, EngineDeadError
from ops.tracing.context import TraceContext

T = TypeVar("T")
logger = logging.getLogger("ray.serve")  # the log that Serve keeps for each replica

SERVER = "llm-server"

# The engine's own queue limit answers 429 at once; Serve must not hold calls back before it.
MAX_ONGOING_REQUESTS = 100_000
NUM_ATTEMPTS = 2
MAX_START_ATTEMPTS = 1  # a model that does not load does not load the next time either
HEALTH_PERIOD_S = 2.0  # Serve acts on the third failure
LOOK_BACK_S = 15.0  # over which figures are averaged; replicas send theirs every 10 s
ROUTING_PERIOD_S = 2.0  # a request is routed by figures of this age at most
CONTROL_TIMEOUT_S = 10.0  # for metrics and tokens, which never wait for a decode step
HEALTH_TIMEOUT_S = 2.0  # a probe waits no longer: Ray would look for a replica while the only one is replaced


class LLMServerDeployment:
    """A `Replica` with the life that Serve gives it."""

    async def __init__(self, config: ServerConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        for handler in logger.handlers:  # our own words belong into the same file
            logging.getLogger("engine").addHandler(handler)
            logging.getLogger("app").addHandler(handler)
        self._is_ending = False
        self._replica = await Replica.start(config, serve.get_replica_context().replica_tag)
        self._server = self._replica.server

    async def reconfigure(self, user_config: Any) -> None:
        """Take Serve's `user_config`: at once, and whatever it is. A raise would end this replica."""
        self._replica.live.apply(user_config)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Answer Serve's controller, for `autoscaling.ReplicaPolicy`."""
        return await self._replica.scaling_figures()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Answer Serve's controller, for `request_router.PrefixLoadRouter`."""
        return await self._replica.routing_figures()

    async def answer(self, call: Call, call_id: str, trace: TraceContext | None = None) -> Messages:
        async with aclosing(self._server.answer(call, call_id, trace)) as messages:
            async for message in messages:
                yield message

    async def reply(self, call: TokenCall) -> Reply:
        return await self._server.reply(call)

    async def card(self) -> ModelCard:
        return self._server.card()

    async def snapshot(self) -> ReplicaSnapshot:
        return await self._replica.snapshot()

    async def health(self) -> None:
        """Answer clients that ask; raises `EngineDeadError`."""
        self._server.check_health()

    async def check_health(self) -> None:
        """Answer Serve that asks; after three refusals in a row it replaces this replica."""
        try:
            self._server.check_health()
        except EngineDeadError as error:
            if not self._is_ending:
                self._is_ending = True
                logger.error("replica ends cause=%r", str(error))
            # Serve waits for open streams, and those of a core that hangs would never end.
            await self._replica.shutdown()
            raise

    async def __del__(self) -> None:
        if hasattr(self, "_replica"):
            await self._replica.shutdown()


class HandleBackend:
    """The server deployment as an ingress sees it. Ray's errors become ours here."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._streams = handle.options(stream=True)
        self._card: ModelCard | None = None

    async def answer(self, call: Call, call_id: str, trace: TraceContext | None = None) -> Messages:
        """Yield what a replica answers. One that died before its first word has lost nothing: another one is
        asked, once, since the call itself may be what kills.
        """
        has_begun = False
        for attempt in range(NUM_ATTEMPTS):
            try:
                async with aclosing(
                    self._ask(call, f"{call_id}.{attempt}" if attempt else call_id, trace)
                ) as answer:
                    async for message in answer:
                        has_begun = True
                        yield message
                return
            except EngineDeadError:
                if has_begun or attempt + 1 == NUM_ATTEMPTS:
                    raise

    async def _ask(self, call: Call, call_id: str, trace: TraceContext | None) -> Messages:
        response: DeploymentResponseGenerator[bytes | Reply] = self._streams.answer.remote(
            call, call_id, trace
        )
        try:
            async for message in response:
                yield message
        except _RAY_ERRORS as error:
            raise _translate(error) from error
        finally:
            response.cancel()  # without effect on one that has ended

    async def reply(self, call: TokenCall) -> Reply:
        reply: Reply = await _translated(self._handle.reply.remote(call))
        return reply

    async def card(self) -> ModelCard:
        """Return what a replica once said of the model: it holds for all, also while none is there."""
        if self._card is None:
            card: ModelCard = await _translated(self._handle.card.remote(), HEALTH_TIMEOUT_S)
            self._card = card
        return self._card

    async def snapshots(self) -> list[ReplicaSnapshot]:
        snapshots: list[ReplicaSnapshot] = await _translated(
            self._handle.broadcast("snapshot").results_async(timeout_s=CONTROL_TIMEOUT_S)
        )
        return snapshots

    async def check_health(self) -> None:
        await _translated(self._handle.health.remote(), HEALTH_TIMEOUT_S)


_RAY_ERRORS = (RayError, BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError)


def _translate(error: Exception) -> CapacityError | EngineDeadError:
    if isinstance(error, BackPressureError):
        return CapacityError("the server is full: try again in a moment")
    return EngineDeadError(str(error))


async def _translated(call: Awaitable[T], timeout_s: float = CONTROL_TIMEOUT_S) -> T:
    try:
        return await asyncio.wait_for(call, timeout_s)
    except TimeoutError as error:
        raise NoReplicaError(f"no server replica answered within {timeout_s:g} s") from error
    except _RAY_ERRORS as error:
        raise _translate(error) from error


@serve.ingress()
class IngressDeployment:
    """The HTTP front as a deployment; the routes live in the application that `Ingress` builds."""

    def __init__(self, server: DeploymentHandle, config: ServerConfig) -> None:
        # Keys are read here: they must not travel with the application's arguments, which Serve logs.
        keys = load_api_keys(config.api_key_file)
        traces = config.tracing.source()
        door = FrontDoor(config.max_body_bytes, config.cors_origins, keys, config.keep_alive_s, traces)
        self._ingress = Ingress(HandleBackend(server), version(), door, config.model_dump(mode="json"))

    async def __serve_build_asgi_app__(self) -> FastAPI:
        return self._ingress.build()


def build(args: ServerConfig) -> Application:
    """Return the Serve application; `serve run app.main:build` calls it with the YAML's `args`."""
    server = serve.deployment(
        LLMServerDeployment,
        name=SERVER,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        graceful_shutdown_timeout_s=args.drain_timeout_s,
        graceful_shutdown_wait_loop_s=1.0,
        health_check_period_s=HEALTH_PERIOD_S,
        max_constructor_retry_count=MAX_START_ATTEMPTS,
        request_router_config=router_config(args),
        ray_actor_options={"num_cpus": 1, "num_gpus": args.num_gpus},
        **scale_options(args),
    )
    ingress = serve.deployment(
        IngressDeployment,
        name="ingress",
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        graceful_shutdown_timeout_s=args.drain_timeout_s,
        graceful_shutdown_wait_loop_s=1.0,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(server.bind(args), args)


def scale_options(args: ServerConfig) -> dict[str, Any]:
    """Return how many replicas Serve shall run: a number, or bounds and our policy."""
    scaling = args.autoscaling
    if scaling.max_replicas is None:
        return {"num_replicas": args.num_replicas}
    bounds = {"min_replicas", "max_replicas", "time_per_token_s"}
    policy = AutoscalingPolicy(
        policy_function="app.autoscaling:ReplicaPolicy", policy_kwargs=scaling.model_dump(exclude=bounds)
    )
    config = AutoscalingConfig(
        min_replicas=scaling.min_replicas,
        max_replicas=scaling.max_replicas,
        look_back_period_s=LOOK_BACK_S,
        # The policy waits by itself, knowing how long a replica takes to be ready.
        upscale_delay_s=0,
        downscale_delay_s=0,
        policy=policy,
    )
    return {"autoscaling_config": config}


def router_config(args: ServerConfig) -> RequestRouterConfig:
    """Return how Serve chooses the replica of a call."""
    if args.routing == "queue":
        return RequestRouterConfig()
    return RequestRouterConfig(
        request_router_class="app.request_router:PrefixLoadRouter",
        request_routing_stats_period_s=ROUTING_PERIOD_S,
    )
