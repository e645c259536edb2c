"""One server for all tests that ask one from outside, and one of the default model for slow ones. Starting it
is left to `server`.
"""

from collections.abc import Iterator

import pytest

from tests.e2e.server import Server, launched, serve


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("tiny")) as server:
        yield server


@pytest.fixture(scope="module")
def default_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of `make serve`, in float32, where no tree changes an answer."""
    with launched(
        "smollm2", ["--dtype", "float32"], tmp_path_factory.mktemp("smollm2") / "serve.txt"
    ) as server:
        yield server
