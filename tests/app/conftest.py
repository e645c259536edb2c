"""The application over an engine that says a given text.

The engine and the readers of answers are left to `harness`.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from app.chat import ChatTemplate
from app.ingress import Ingress
from app.server import LLMServer
from app.tokenizer import Tokenizer
from tests.app.harness import MAX_NUM_WAITING, LocalBackend, SpokenEngine, write_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer(model_folder)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> SpokenEngine:
    return SpokenEngine(tokenizer)


@pytest.fixture
def application(engine: SpokenEngine, tokenizer: Tokenizer, model_folder: Path) -> FastAPI:
    server = LLMServer(engine, tokenizer, ChatTemplate(model_folder), "tiny", MAX_NUM_WAITING)
    return Ingress(LocalBackend(server), "0.1.0", max_body_bytes=100_000).build()


@pytest.fixture
async def client(application: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(application)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client
