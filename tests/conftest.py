"""What every test runs under: one thread, no hub, no Ray token, repeatable examples.

Fixtures of one package are left to that package's own conftest.
"""

import os

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
