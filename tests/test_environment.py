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


def test_a_core_in_a_core_environment_changes_nothing_more(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", core_environment()["GLIBC_TUNABLES"])
    assert core_environment()["GLIBC_TUNABLES"] == os.environ["GLIBC_TUNABLES"]


def test_a_process_enters_the_environment_once_with_all_its_arguments(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")
    script = (
        "import os, sys; from engine.environment import enter_core_environment\n"
        "print(os.environ['GLIBC_TUNABLES'], sys.argv[1:], os.getpid(), flush=True)\n"
        "enter_core_environment()\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", script, "a b", "--c"]
    first, second = subprocess.run(
        command, env={**core_environment(), **os.environ}, capture_output=True, check=True, text=True
    ).stdout.splitlines()
    assert first.startswith("glibc.malloc.arena_max=2 ['a b', '--c'] ")
    assert second == first.replace("glibc.malloc", "glibc.malloc.hugetlb=1:glibc.malloc", 1)


def huge_kilobytes(environment):
    command = [sys.executable, "-W", "ignore", "-c", ALLOCATE]
    return int(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)


@pytest.mark.skipif(not THP.exists() or "[madvise]" not in THP.read_text(), reason="no huge pages on request")
def test_packed_weights_lie_in_huge_pages_unless_the_user_says_no(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert huge_kilobytes(core_environment()) >= 48 * 1024  # of the 64 MiB of one weight
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    assert huge_kilobytes(core_environment()) == 0
