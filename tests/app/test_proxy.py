"""The words of Serve's proxy become OpenAI errors; what the application answers is not touched."""

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response

from app.proxy import CALLBACK, middlewares


def answering(response: Response) -> httpx.AsyncClient:
    """Return a client of a proxy whose inner application says `response` to everything."""
    app = Starlette(middleware=middlewares())
    app.mount("/", response)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.mark.parametrize(
    ("status", "expected", "code", "retry_after"),
    [
        (404, 503, "server_unavailable", "1"),  # nothing is registered yet
        (503, 503, "server_unavailable", "1"),
        (500, 500, "internal_error", None),
        (408, 408, "timeout", None),
    ],
)
async def test_plain_error_of_the_proxy_becomes_an_openai_error(
    status: int, expected: int, code: str, retry_after: str | None
) -> None:
    async with answering(PlainTextResponse("Path '/v1/models' not found.", status)) as client:
        answer = await client.get("/v1/models")
    assert answer.status_code == expected
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers.get("retry-after") == retry_after
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("server_error", code)
    assert "Path" not in error["message"]


@pytest.mark.parametrize(
    "response",
    [
        JSONResponse({"error": {"message": "no such path"}}, 404),
        PlainTextResponse("eyas_steps_total 1\n", 200),
        Response(status_code=204),
    ],
)
async def test_answer_of_the_application_is_not_touched(response: Response) -> None:
    async with answering(response) as client:
        answer = await client.get("/v1/models")
    assert (answer.status_code, answer.content) == (response.status_code, response.body)


async def test_own_pages_of_serve_are_not_touched() -> None:
    async with answering(PlainTextResponse("Route table is not populated yet.", 503)) as client:
        answer = await client.get("/-/healthz")
    assert answer.text == "Route table is not populated yet."


def test_serve_can_find_the_callback() -> None:
    assert f"{middlewares.__module__}:{middlewares.__name__}" == CALLBACK
