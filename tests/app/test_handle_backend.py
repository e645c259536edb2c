"""What Ray's handle raises reaches the ingress as our errors, and a stream that is left is cancelled."""

import asyncio
import warnings
from collections.abc import Callable

import pytest
from pydantic import ValidationError

from app.call import CallOptions, CompletionCall
from app.errors import NoReplicaError
from engine import CapacityError, EngineDeadError, SamplingParams

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own deprecated use of pydantic, while it is imported
    from ray.exceptions import RayActorError
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
    from ray.serve.exceptions import BackPressureError

    from app import main
    from app.main import HandleBackend, build

CALL = CompletionCall(
    ("x",), CallOptions("tiny", SamplingParams(), None, 1, (), False, True, True, False, False)
)


class FakeResponse:
    """Yields two messages, then raises `error` or waits for ever."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error
        self._num_left = 2
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


async def test_stream_that_is_left_is_cancelled() -> None:
    response = FakeResponse(None)
    messages = HandleBackend(FakeHandle(response)).answer(CALL, "id")
    assert await anext(messages) == b"data"
    await messages.aclose()
    assert response.is_cancelled
