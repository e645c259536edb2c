"""The application over an engine that says a given text.

The engine and the readers of answers are left to `harness`.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from app.chat import ChatTemplate
from app.tokenizer import Tokenizer
from tests.app.harness import SpokenEngine, client_of, make_application, write_model


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
    return make_application(engine, tokenizer, ChatTemplate(model_folder))


@pytest.fixture
async def client(application: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(application) as client:
        yield client
