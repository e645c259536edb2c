"""Argument types and groups that several commands share.

Which command takes which is left to `cli`.
"""

import argparse
import math
from typing import TypeAlias

# The type has no public name, and takes its argument for type checkers only.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001
DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_model(
    parser: argparse.ArgumentParser, model: str | None = "smollm2", draft: str | None = "auto"
) -> None:
    parser.add_argument("--model", default=model, metavar="M", help="an alias, a folder, or hf://org/name")
    parser.add_argument(
        "--draft", default=draft, metavar="D", help="a folder, auto (the one shipped for the model) or none"
    )


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {text}")
    return value


def positive_list(text: str) -> tuple[int, ...]:
    return tuple(positive(item) for item in text.split(","))


def non_negative_floats(text: str) -> tuple[float, ...]:
    """Return numbers of 0 or more, separated by commas."""
    values = tuple(float(item) for item in text.split(","))
    if any(not 0 <= value < math.inf for value in values):
        raise argparse.ArgumentTypeError(f"must be 0 or more, found {text}")
    return values


def natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, found {text}")
    return value


def natural_list(text: str) -> tuple[int, ...]:
    return tuple(natural(item) for item in text.split(","))


def names(text: str) -> tuple[str, ...]:
    """Return names separated by commas."""
    return tuple(item.strip() for item in text.split(","))
