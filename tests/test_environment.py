"""The environment of an engine core: huge pages for the weights, and the user's own settings kept."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.environment import core_environment

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
ALLOCATE = """
import torch
kept = torch.ops.mkldnn._reorder_linear_weight(torch.ones(4096, 4096), 32)
print(next(line.split()[1] for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages")))
"""


def test_a_users_own_settings_are_kept_and_come_last(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0:glibc.malloc.arena_max=2")
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    monkeypatch.setenv("EYAS_CACHE", "/cache")
    environment = core_environment()
    assert environment["GLIBC_TUNABLES"] == (
        "glibc.malloc.hugetlb=1:glibc.malloc.hugetlb=0:glibc.malloc.arena_max=2"
    )
    assert environment["PYTHONPATH"] == f"{Path(__file__).parents[1]}{os.pathsep}/theirs"
    assert environment["EYAS_CACHE"] == "/cache"


def huge_kilobytes(environment):
    command = [sys.executable, "-W", "ignore", "-c", ALLOCATE]
    return int(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)


@pytest.mark.skipif(not THP.exists() or "[madvise]" not in THP.read_text(), reason="no huge pages on request")
def test_packed_weights_lie_in_huge_pages_unless_the_user_says_no(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert huge_kilobytes(core_environment()) >= 48 * 1024  # of the 64 MiB of one weight
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    assert huge_kilobytes(core_environment()) == 0
