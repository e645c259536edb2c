"""The arguments of `eyas validate`.

What is done with them is left to `cli_validate`.
"""

import argparse
from pathlib import Path

from app.options import DTYPES, Commands, add_model, names, positive, positive_list

MIN_BLOCKS = 3  # of an interval


def add_validate(commands: Commands) -> None:
    """Add `eyas validate` and what it can validate."""
    validate = commands.add_parser("validate", help="judge a server: exit status 0, 3 regression, 4 unknown")
    kinds = validate.add_subparsers(required=True, metavar="WHAT")
    speedup = kinds.add_parser("speedup", help="speculation against plain decoding, over HTTP")
    speedup.set_defaults(module="app.cli_validate")
    speedup.add_argument("--url", metavar="URL", help="a running server; else one is started")
    add_model(speedup)
    speedup.add_argument("--dtype", choices=DTYPES, default="auto", help="of a server that is started")
    speedup.add_argument("--batch", type=positive_list, default=(1, 2, 4), metavar="N,N", help="batch sizes")
    speedup.add_argument(
        "--blocks", type=_blocks, default=6, metavar="N", help="per batch size; four runs each"
    )
    speedup.add_argument("--max-tokens", type=positive, default=64, metavar="N", help="tokens per answer")
    speedup.add_argument(
        "--tree", default="auto", metavar="T", help="the arm to judge: auto or a tree's name"
    )
    speedup.add_argument(
        "--floor",
        type=_floors,
        default={None: 1.0},
        metavar="X|N:X,N:X",
        help="least speed-up, for all batch sizes or for each",
    )
    speedup.add_argument("--baseline", type=Path, metavar="FILE", help="JSON of an earlier run, as the floor")
    speedup.add_argument("--margin", type=_share, default=0.05, metavar="X", help="share that may be missing")
    speedup.add_argument("--out", type=Path, default=Path("speedup"), metavar="FOLDER", help="for the report")


def _blocks(text: str) -> int:
    value = positive(text)
    if value < MIN_BLOCKS:
        raise argparse.ArgumentTypeError(f"an interval needs at least {MIN_BLOCKS} blocks, found {text}")
    return value


def _floors(text: str) -> dict[int | None, float]:
    """Read one number for all batch sizes (under None), or pairs such as 1:1.2,4:1.0."""
    floors: dict[int | None, float] = {}
    for item in names(text):
        batch, colon, value = item.rpartition(":")
        floors[positive(batch) if colon else None] = float(value)
    if any(not 0 < value < 1000 for value in floors.values()):
        raise argparse.ArgumentTypeError(f"must be above 0, found {text}")
    return floors


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be in [0, 1), found {text}")
    return value
