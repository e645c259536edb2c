"""The repository holds sources and the shipped draft heads: history keeps every large file for ever."""

import subprocess

import pytest

MAX_BYTES = 1 << 20
MAX_PRETRAINED_BYTES = 25_000_000


def test_only_draft_heads_are_large(pytestconfig):
    root = pytestconfig.rootpath
    if not (root / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True, text=True)
    sizes = {
        name: (root / name).stat().st_size for name in listed.stdout.split("\0") if (root / name).is_file()
    }
    pretrained = {name: size for name, size in sizes.items() if name.startswith("engine/draft/pretrained/")}
    assert len(sizes) > 500
    assert {name for name, size in sizes.items() if size > MAX_BYTES} <= pretrained.keys()
    assert sum(pretrained.values()) <= MAX_PRETRAINED_BYTES
