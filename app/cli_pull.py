"""`eyas pull`: a model is fetched into the cache.

The fetching itself is left to the engine's weights.
"""

import argparse
from typing import TextIO

from engine import resolve_model


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Fetch the model where it is absent or damaged and write its folder to `out`."""
    out.write(f"{resolve_model(options.model, verify=True)}\n")
    return 0
