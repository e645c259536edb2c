"""One server with a real engine core in a process of its own, in front of it the ingress; Ray is left out."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from app.config import ServerConfig
from app.ingress import FrontDoor, Ingress
from app.server import LLMServer
from tests.app.harness import LocalBackend, client_of
from tests.app.tiny_model import write_random_draft, write_random_model
from tests.faults.served import Served


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("tiny")
    write_random_model(folder)
    write_random_draft(folder / "draft")
    config = ServerConfig.model_validate(
        {
            "model": str(folder),
            "draft": str(folder / "draft"),
            "served_model_name": "tiny",
            "engine": {"dtype": "float32", "max_model_len": 256, "memory_gib": 0.002},
        }
    )
    server = await LLMServer.start(config)
    try:
        async with client_of(Ingress(LocalBackend(server), "0", FrontDoor(100_000)).build()) as client:
            yield Served(server, client)
    finally:
        await server.shutdown()
