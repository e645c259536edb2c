"""The table of kinds is true: every test that it names exists, and what is said to be absent has none."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.faults.kinds import KINDS
from tests.faults.patches import PATCHES


@cache
def names_in(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


@pytest.mark.parametrize("name", KINDS)
def test_kind_has_tests_that_exist_or_cannot_occur(name: str, pytestconfig: pytest.Config) -> None:
    kind = KINDS[name]
    assert bool(kind.tests) != bool(kind.absent)
    for test in kind.tests:
        file, _, function = test.partition("::")
        assert function in names_in(pytestconfig.rootpath / file), test


def test_at_least_twenty_kinds_can_be_brought_back() -> None:
    assert len({patch.kind for patch in PATCHES}) >= 20
