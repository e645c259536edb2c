"""What a server tells of its dispatcher, and `eyas trees explain` on it."""

import asyncio
import dataclasses
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import jsonschema
import pytest

from app.cli import main
from app.dispatch_body import DISPATCHER
from benchmarks.dispatcher_simulation import Simulation, Traffic, build_dispatcher
from benchmarks.dispatcher_world import Acceptance, h200_world
from engine import DEFAULT_PROFILE
from engine.dispatch_stats import DispatchStats
from tests.app.harness import SpokenEngine


def learnt() -> DispatchStats:
    """Return what a dispatcher says that has learnt for a while."""
    world = h200_world()
    dispatcher = build_dispatcher(world)
    Simulation(world, Acceptance(lambda _: DEFAULT_PROFILE), Traffic(lambda _: 16), dispatcher, 0).run(300)
    return dispatcher.stats()


async def told(client: httpx.AsyncClient) -> bytes:
    response = await client.get(DISPATCHER)
    assert response.status_code == 200
    document = (await client.get("/openapi.json")).json()
    schema = document["components"]["schemas"]["Dispatchers"]
    jsonschema.validate(response.json(), {"components": document["components"]} | schema)
    return response.content


class _Server(BaseHTTPRequestHandler):
    body, key = b"", ""

    def do_GET(self) -> None:
        is_allowed = self.path == DISPATCHER and self.headers.get("Authorization") == f"Bearer {self.key}"
        self.send_response(200 if is_allowed else 401)
        self.end_headers()
        self.wfile.write(self.body if is_allowed else b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


async def test_a_running_server_is_explained(client, engine: SpokenEngine, url, capsys) -> None:
    engine.dispatch = stats = learnt()
    body = await told(client)
    (replica,) = json.loads(body)["replicas"]
    assert (replica["replica"], replica["arm"], replica["reason"]) == ("local", stats.arm, stats.reason)
    assert [total["name"] for total in replica["totals"]] == [total.name for total in stats.totals]
    _Server.body, _Server.key = body, "secret"
    assert await asyncio.to_thread(main, ["trees", "explain", url, "--key", "secret"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"replica local: {stats.arm} ({stats.reason})\n")
    assert f"Choice: {stats.arm} ({stats.reason})." in text
    assert await asyncio.to_thread(main, ["trees", "explain", url, "--key", "wrong"]) == 1
    assert "401" in capsys.readouterr().err


async def test_a_dispatcher_that_learns_nothing_is_named_only(client, engine, url, capsys) -> None:
    engine.dispatch = dataclasses.replace(DispatchStats(), arm="chain-3", reason="by the table")
    _Server.body, _Server.key = await told(client), "secret"
    assert await asyncio.to_thread(main, ["trees", "explain", url, "--key", "secret"]) == 0
    assert capsys.readouterr().out == "replica local: chain-3 (by the table)\n"


def test_a_server_that_is_not_there_is_one_clear_line(capsys) -> None:
    assert main(["trees", "explain", "http://127.0.0.1:9"]) == 1
    assert "cannot read http://127.0.0.1:9/admin/dispatcher" in capsys.readouterr().err
