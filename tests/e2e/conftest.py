"""One server for all tests that ask one from outside. Starting it is left to `server`."""

from collections.abc import Iterator

import pytest

from tests.e2e.server import Server, serve


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("tiny")) as server:
        yield server
