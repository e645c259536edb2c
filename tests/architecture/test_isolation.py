"""`engine` imports with torch alone: no server, tokenizer or hub library at import; so do the benchmarks.

A fresh interpreter hides the other libraries; which imports are written where is left to `imports`.
"""

import subprocess
import sys

import pytest

from tests.architecture import rules
from tests.architecture.sources import is_within, read_sources

HIDE_AND_IMPORT = """
import importlib, sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
for name in {modules!r}:
    importlib.import_module(name)
"""


def import_without(hidden, modules, root) -> subprocess.CompletedProcess[str]:
    code = HIDE_AND_IMPORT.format(hidden=frozenset(hidden), modules=modules)
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)


def test_engine_imports_with_torch_alone(pytestconfig):
    root = pytestconfig.rootpath
    engine = read_sources(root, ("engine",))
    modules = [module for module in engine.modules if not is_within(module, rules.LIBRARY_MODULES)]
    assert len(modules) > 20
    result = import_without(rules.ABSENT_LIBRARIES, modules, root)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("module", "allowed"),
    [("app.cli_bench_synthetic", ()), ("app.cli_bench", ("tokenizers",)), ("app.cli_eval", ("tokenizers",))],
)
def test_measuring_needs_no_server(module, allowed, pytestconfig):
    """GPU machines have torch, and for text tokenizers and jinja2."""
    hidden = set(rules.ABSENT_LIBRARIES) - set(allowed)
    result = import_without(hidden, [module], pytestconfig.rootpath)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("line", ["import tokenizers", "import numpy.linalg"])
def test_a_hidden_library_is_noticed(line, tmp_path):
    (tmp_path / "offender.py").write_text(line + "\n")
    result = import_without(rules.ABSENT_LIBRARIES, ["offender"], tmp_path)
    assert result.returncode != 0
    assert "No module named" in result.stderr
