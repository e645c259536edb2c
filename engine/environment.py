"""The environment of a process that runs the engine. What the engine does there is left to `core`."""

import os
import sys
from pathlib import Path

_HUGE_PAGES = "glibc.malloc.hugetlb=1"  # read by the C library when a process starts, ignored by others


def core_environment() -> dict[str, str]:
    """Return this process's environment, made fit for a core.

    Weights lie in huge pages: a CPU reads all of them for every token, and with small ones it waits for the
    page table too (measured: a token of plain decoding takes 0.83 to 0.88 of the time). A user's own
    GLIBC_TUNABLES come last and win. The package may be on this process's path only, as in a test run from a
    checkout.
    """
    theirs = os.environ.get("GLIBC_TUNABLES", "")
    tunables = [theirs] if theirs.startswith(_HUGE_PAGES) else [_HUGE_PAGES, theirs]
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "GLIBC_TUNABLES": ":".join(filter(None, tunables)),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def enter_core_environment() -> None:
    """Start this process anew where its settings for the C library are not a core's."""
    environment = core_environment()
    if environment["GLIBC_TUNABLES"] != os.environ.get("GLIBC_TUNABLES"):
        os.execve(sys.executable, sys.orig_argv, environment)  # noqa: S606
