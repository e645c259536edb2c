"""The patches are kept true: each applies, and each makes its test fail."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.kinds import KINDS
from tests.faults.patches import PATCHES, Patch

FOLDERS = ("app", "engine", "ops", "loadtest", "tests", "benchmarks")
FILES = ("pyproject.toml", "README.md", "Makefile")


def apply(patch: Patch, root: Path) -> None:
    path = root / patch.file
    text = path.read_text(encoding="utf-8")
    assert text.count(patch.old) == 1, f"{patch.file} has this {text.count(patch.old)} times: {patch.old}"
    path.write_text(text.replace(patch.old, patch.new), encoding="utf-8")


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.kind)
def test_patch_applies_to_one_place_and_is_python(
    patch: Patch, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    copy = tmp_path / patch.file
    copy.parent.mkdir(parents=True)
    shutil.copy(pytestconfig.rootpath / patch.file, copy)
    apply(patch, tmp_path)
    ast.parse(copy.read_text(encoding="utf-8"))
    assert patch.test in KINDS[patch.kind].tests


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """A copy of the sources to break."""
    root = tmp_path_factory.mktemp("tree")
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(pytestconfig.rootpath / folder, root / folder, ignore=ignored)
    for file in FILES:
        shutil.copy(pytestconfig.rootpath / file, root / file)
    return root


def run(test: str, root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--timeout", "100", test]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=280, check=False, env=environment
    )


@pytest.mark.slow
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.kind)
def test_fault_is_found_by_its_test(patch: Patch, tree: Path) -> None:
    whole = (tree / patch.file).read_text(encoding="utf-8")
    apply(patch, tree)
    try:
        done = run(patch.test, tree)
    finally:
        (tree / patch.file).write_text(whole, encoding="utf-8")
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.slow
def test_sources_without_a_patch_pass(tree: Path) -> None:
    done = run("tests/app/test_answer.py", tree)
    assert done.returncode == 0, done.stdout[-3000:]
