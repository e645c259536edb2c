"""What Ray's handle raises reaches the ingress as our errors, and a stream that is left is cancelled."""

import asyncio
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from app.autoscaling import ReplicaPolicy, ScalingRule
from app.call import CallOptions, CompletionCall
from app.errors import NoReplicaError
from app.server import ModelCard
from engine import CapacityError, EngineDeadError, SamplingParams

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own deprecated use of pydantic, while it is imported
    from ray.exceptions import RayActorError
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
    from ray.serve._private.common import DeploymentID, ReplicaID
    from ray.serve.exceptions import BackPressureError

    from app import main
    from app.main import HandleBackend, build
    from app.request_router import PrefixLoadRouter

DEPLOYMENT = DeploymentID("llm-server")

CALL = CompletionCall(
    ("x",), CallOptions("tiny", SamplingParams(), None, 1, (), False, True, True, False, False)
)


class FakeResponse:
    """Yields messages, then raises `error` or waits for ever."""

    def __init__(self, error: Exception | None, num_messages: int = 2) -> None:
        self._error = error
        self._num_left = num_messages
        self.is_cancelled = False

    def __aiter__(self) -> "FakeResponse":
        return self

    async def __anext__(self) -> bytes:
        if self._num_left == 0:
            if self._error is None:
                await asyncio.Event().wait()
            assert self._error is not None
            raise self._error
        self._num_left -= 1
        return b"data"

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeHandle:
    def __init__(self, response: FakeResponse | None = None, error: Exception | None = None) -> None:
        self._response, self._error = response, error

    def options(self, stream: bool) -> "FakeHandle":
        assert stream
        return self

    @property
    def answer(self) -> "FakeHandle":
        return self

    card = health = answer

    def remote(self, *arguments: object) -> object:
        if self._response is not None:
            return self._response

        async def fail() -> None:
            assert self._error is not None
            raise self._error

        return fail()


def test_application_is_built_from_the_arguments_of_a_serve_file() -> None:
    arguments = {"model": "m", "num_replicas": 3, "num_gpus": 1, "drain_timeout_s": 90}
    application = call_user_app_builder_with_args_if_necessary(build, arguments)
    assert application._bound_deployment.name == "ingress"
    server = application._bound_deployment.init_args[0]._bound_deployment
    assert server.num_replicas == 3
    assert server.ray_actor_options == {"num_cpus": 1, "num_gpus": 1.0}
    assert server._deployment_config.graceful_shutdown_timeout_s == 90
    with pytest.raises(ValidationError, match="modle"):
        call_user_app_builder_with_args_if_necessary(build, {"modle": "m"})


ERRORS: list[tuple[Callable[[], Exception], type[Exception]]] = [
    (RayActorError, EngineDeadError),
    (lambda: BackPressureError(num_queued_requests=1, max_queued_requests=1), CapacityError),
]


@pytest.mark.parametrize(("make_error", "expected"), ERRORS)
async def test_error_of_ray_becomes_ours(
    make_error: Callable[[], Exception], expected: type[Exception]
) -> None:
    backend = HandleBackend(FakeHandle(FakeResponse(make_error())))
    messages = backend.answer(CALL, "id")
    assert [await anext(messages), await anext(messages)] == [b"data", b"data"]
    with pytest.raises(expected):
        await anext(messages)
    with pytest.raises(expected):
        await HandleBackend(FakeHandle(error=make_error())).check_health()


async def test_probe_is_not_kept_waiting_while_ray_looks_for_a_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class SearchingHandle(FakeHandle):
        def remote(self, *arguments: object) -> object:
            return asyncio.Event().wait()

    assert main.HEALTH_TIMEOUT_S <= 2
    monkeypatch.setattr(main, "HEALTH_TIMEOUT_S", 0.05)
    with pytest.raises(NoReplicaError, match=r"within 0\.05 s"):
        await asyncio.wait_for(HandleBackend(SearchingHandle()).check_health(), 2)


async def test_the_model_card_waits_for_the_first_replica_as_a_probe_does_and_never_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = ModelCard("tiny", 1, 512)
    answers = [asyncio.Event().wait(), asyncio.sleep(0, card)]  # a search for a replica, then a replica

    class StartingHandle(FakeHandle):
        def remote(self, *arguments: object) -> object:
            return answers.pop(0)

    backend = HandleBackend(StartingHandle())
    monkeypatch.setattr(main, "HEALTH_TIMEOUT_S", 0.05)
    with pytest.raises(NoReplicaError, match=r"within 0\.05 s"):
        await asyncio.wait_for(backend.card(), 2)
    assert [await backend.card(), await backend.card()] == [card, card]
    assert not answers, "the second one asked nobody"


async def test_stream_that_is_left_is_cancelled() -> None:
    response = FakeResponse(None)
    messages = HandleBackend(FakeHandle(response)).answer(CALL, "id")
    assert await anext(messages) == b"data"
    await messages.aclose()
    assert response.is_cancelled


class FakeHandles:
    """Answers the calls of a backend in turn."""

    def __init__(self, *responses: FakeResponse) -> None:
        self._responses = list(responses)
        self.call_ids: list[str] = []

    def options(self, stream: bool) -> "FakeHandles":
        assert stream
        return self

    @property
    def answer(self) -> "FakeHandles":
        return self

    def remote(self, call: CompletionCall, call_id: str, trace: object) -> FakeResponse:
        assert call is CALL
        self.call_ids.append(call_id)
        return self._responses[len(self.call_ids) - 1]


async def test_a_replica_that_died_before_its_first_word_is_replaced_by_another() -> None:
    dead, alive = FakeResponse(RayActorError(), num_messages=0), FakeResponse(None)
    handles = FakeHandles(dead, alive)
    messages = HandleBackend(handles).answer(CALL, "id")
    assert [await anext(messages), await anext(messages)] == [b"data", b"data"]
    await messages.aclose()
    assert handles.call_ids == ["id", "id.1"]
    assert dead.is_cancelled
    assert alive.is_cancelled


@pytest.mark.parametrize(
    ("responses", "num_calls", "expected"),
    [
        ([(RayActorError(), 0), (RayActorError(), 0)], 2, EngineDeadError),
        ([(RayActorError(), 1)], 1, EngineDeadError),
        ([(BackPressureError(num_queued_requests=1, max_queued_requests=1), 0)], 1, CapacityError),
    ],
)
async def test_a_call_is_asked_again_once_and_only_where_nothing_was_said(
    responses: list[tuple[Exception, int]], num_calls: int, expected: type[Exception]
) -> None:
    handles = FakeHandles(*(FakeResponse(error, num) for error, num in responses))
    with pytest.raises(expected):
        _ = [message async for message in HandleBackend(handles).answer(CALL, "id")]
    assert len(handles.call_ids) == num_calls


def test_scaling_and_routing_reach_serve() -> None:
    def server_of(**arguments: object) -> Any:
        application = call_user_app_builder_with_args_if_necessary(build, {"model": "m", **arguments})
        return application._bound_deployment.init_args[0]._bound_deployment

    scaled = server_of(autoscaling={"min_replicas": 2, "max_replicas": 5, "down_use": 0.4})
    config = scaled._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas) == (2, 5)
    policy = ReplicaPolicy(**config.policy.policy_kwargs)
    assert policy._rule == ScalingRule(down_use=0.4)
    assert config.policy.policy_function == "app.autoscaling:ReplicaPolicy"
    router = scaled._deployment_config.request_router_config
    assert router.request_router_class == "app.request_router:PrefixLoadRouter"
    fixed = server_of(routing="queue", num_replicas=3)
    assert fixed._deployment_config.autoscaling_config is None
    assert "PowerOfTwo" in fixed._deployment_config.request_router_config.request_router_class


async def test_the_router_of_serve_ranks_by_prompt_and_load() -> None:
    def replica(name: str, num_running: float) -> Any:
        stats = {"num_running": num_running, "num_waiting": 0.0, "capacity": 10.0}
        return SimpleNamespace(replica_id=ReplicaID(name, DEPLOYMENT), routing_stats=stats)

    router = object.__new__(PrefixLoadRouter)  # Serve's own part needs a running Serve
    router.initialize_state()
    calls = [CompletionCall((text * 600,), CALL.options) for text in "xy"]
    x, y = (SimpleNamespace(args=[call]) for call in calls)
    replicas = [replica("a", 3.0), replica("b", 1.0)]

    async def best(request: Any) -> str:
        ranked = await router.choose_replicas(replicas, request)
        assert sorted(group[0].replica_id.unique_id for group in ranked) == ["a", "b"]
        return str(ranked[0][0].replica_id.unique_id)

    assert await best(x) == "b"
    router.on_request_routed(x, replicas[0].replica_id, None)
    assert await best(x) == "a", "it knows the prompt"
    assert await best(y) == "b"
    for _ in range(6):
        router.on_request_routed(y, replicas[0].replica_id, None)
    assert await best(x) == "b", "seven calls are more than a prompt is worth"
    for _ in range(7):
        router.on_request_completed(replicas[0].replica_id, "id")
    assert await best(x) == "a"
    assert await best(None) == "b", "what is no call has no prompt"
