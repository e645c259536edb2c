"""What every test runs under: one thread, no hub, no Ray token, repeatable examples.

Fixtures of one package are left to that package's own conftest.
"""

import os

import pytest

# Before the first import of torch, tokenizers or ray, which read these once.
os.environ["OMP_NUM_THREADS"] = "1"  # two spinning threads on two busy cores are slower than one
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_AUTH_MODE"] = "disabled"  # else a local cluster writes a token to the home folder
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from hypothesis import settings

# The same examples on every run and no deadline: a slow machine must not turn a law into a failure.
settings.register_profile("suite", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("suite")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where two processes share the suite, one of them runs all that starts Ray, and begins with it: these
    tests mostly wait. The others go file by file, since fixtures are made once a file.
    """
    for item in items:
        group = "ray" if item.get_closest_marker("e2e") else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.get_closest_marker("e2e") is None)
