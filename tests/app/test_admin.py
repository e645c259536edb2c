"""`/admin/status`: what replicas run, for those who have a key."""

from pathlib import Path

import httpx
import pytest

from app.api_keys import ApiKeys
from app.chat import ChatTemplate
from app.ingress import FrontDoor
from app.tokenizer import Tokenizer
from engine import EngineDeadError
from tests.app.harness import LocalBackend, SpokenEngine, client_of, make_application


async def test_status_names_what_is_loaded(client: httpx.AsyncClient) -> None:
    answer = await client.get("/admin/status")
    assert answer.status_code == 200
    (replica,) = answer.json()["replicas"]
    assert replica["model"]["digest"]
    assert replica["draft"]["state"] == "none"
    assert replica["arms"]["rows"] == {"chain-3": 8, "off": 2}
    memory = replica["memory"]
    assert memory["num_free"] + memory["num_held"] + memory["num_cached"] == memory["num_blocks"]


async def test_status_asks_for_a_key_like_every_call(
    engine: SpokenEngine, tokenizer: Tokenizer, model_folder: Path
) -> None:
    door = FrontDoor(100_000, keys=ApiKeys(["secret"]))
    client = client_of(make_application(engine, tokenizer, ChatTemplate(model_folder), door=door))
    assert (await client.get("/admin/status")).status_code == 401
    known = await client.get("/admin/status", headers={"authorization": "Bearer secret"})
    assert known.status_code == 200


async def test_status_of_a_dead_engine_is_an_error(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: LocalBackend) -> list[object]:
        raise EngineDeadError("gone")

    monkeypatch.setattr(LocalBackend, "snapshots", fail)
    answer = await client.get("/admin/status")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_unavailable"
