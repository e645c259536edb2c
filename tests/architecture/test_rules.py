"""The repository keeps every rule of `rules`, and every check can fail.

Each check has samples that break it once and name the violation; samples that must pass guard its fairness.
"""

import pytest

from tests.architecture import imports, rules, shape
from tests.architecture.sources import SourceSet, read_sources

CHECKS = {
    check.__name__: check
    for check in (
        imports.check_floors,
        imports.check_parts,
        imports.check_policy,
        imports.check_import_style,
        shape.check_sizes,
        shape.check_names,
        shape.check_docstrings,
        shape.check_module_state,
        shape.check_marks,
    )
}
DOC = '"""One thing. Others do the rest."""\n'
MARK = "TO" + "DO"

# check, files (path -> source), a part of the one violation
BROKEN = [
    (
        "check_floors",
        {"engine/config.py": "from engine.request import Request\n", "engine/request.py": ""},
        "floor 0",
    ),
    (
        "check_floors",
        {"engine/stats.py": "import engine.runner.runner\n", "engine/runner/runner.py": ""},
        "floor 5",
    ),
    (
        "check_floors",
        {"engine/layers/a.py": "from engine.sampling.b import c\n", "engine/sampling/b.py": ""},
        "floor 2",
    ),
    (
        "check_floors",
        {"engine/model/a.py": "from engine.draft import b\n", "engine/draft/b.py": ""},
        "engine.draft.b",
    ),
    (
        "check_floors",
        {"engine/scheduler/a.py": "from engine.model import b\n", "engine/model/b.py": ""},
        "floor 4",
    ),
    (
        "check_floors",
        {"engine/model/config.py": "import engine.model.b\n", "engine/model/b.py": ""},
        "floor 1",
    ),
    (
        "check_floors",
        {"engine/errors.py": "from engine import Engine\n", "engine/__init__.py": ""},
        "above all floors",
    ),
    (
        "check_floors",
        {
            "engine/tree/a.py": "TYPE_CHECKING = False\nif TYPE_CHECKING:\n    from engine.batch import B\n",
            "engine/batch.py": "",
        },
        "engine.batch",
    ),
    ("check_floors", {"engine/novel.py": ""}, "stands on no floor"),
    (
        "check_parts",
        {"app/a.py": "from engine.batch import StepPlan\n", "engine/batch.py": ""},
        "may not import",
    ),
    (
        "check_parts",
        {"app/a.py": "from ops.rollout import b\n", "ops/rollout/b.py": ""},
        "app may not import",
    ),
    ("check_parts", {"ops/a.py": "from app import b\n", "app/b.py": ""}, "ops may not import"),
    ("check_parts", {"loadtest/a.py": "from engine import E\n", "engine/__init__.py": ""}, "nothing of ours"),
    ("check_policy", {"engine/scheduler/a.py": "import torch\n"}, "torch <- engine.scheduler.a"),
    (
        "check_policy",
        {
            "engine/dispatcher/a.py": "from engine.kvcache import b\n",
            "engine/kvcache/b.py": "from engine.layers.c import D\n",
            "engine/layers/c.py": "from torch import nn\n",
        },
        "torch.nn <- engine.layers.c <- engine.kvcache.b <- engine.dispatcher.a",
    ),
    ("check_policy", {"engine/scheduler/queue.py": "from time import monotonic\n"}, "policy imports time"),
    ("check_policy", {"engine/kvcache/block_pool.py": "table = open('x')\n"}, "opens a file"),
    ("check_import_style", {"engine/a.py": "from .b import c\n"}, "relative import"),
    ("check_import_style", {"app/a.py": "def f():\n    import json\n"}, "inside a function"),
    ("check_import_style", {"engine/a.py": "import numpy\n"}, "torch alone"),
    ("check_import_style", {"engine/layers/a.py": "def f():\n    import xgrammar\n"}, "inside a function"),
    (
        "check_import_style",
        {"engine/a.py": "import engine.kernels.b\n", "engine/kernels/b.py": ""},
        "optional library",
    ),
    ("check_sizes", {"app/a.py": DOC + "x = 1\n" * rules.MAX_FILE_LINES}, "split it up"),
    (
        "check_sizes",
        {"app/a.py": "def long():\n" + "    x = 1\n" * rules.MAX_FUNCTION_LINES},
        "long has 61 lines",
    ),
    (
        "check_sizes",
        {f"engine/scheduler/a{idx}.py": "x = 1\n" * 400 for idx in range(13)},
        "the core has 5200",
    ),
    ("check_names", {"app/string_utils.py": ""}, "string_utils"),
    ("check_names", {"app/a.py": "class BlockManager:\n    x = 1\n"}, "BlockManager"),
    ("check_names", {"app/a.py": "def plan_helper():\n    x = 1\n"}, "plan_helper"),
    ("check_names", {"app/a.py": "class A:\n    def _handle_row(self):\n        x = 1\n"}, "_handle_row"),
    ("check_names", {"app/a.py": "async def process_step():\n    x = 1\n"}, "process_step"),
    ("check_docstrings", {"app/a.py": '"""One sentence only."""\n'}, "two sentences"),
    ("check_docstrings", {"app/a.py": "x = 1\n"}, "two sentences"),
    ("check_docstrings", {"engine/a.py": DOC + "def f():\n    x = 1\n    return x\n"}, "f needs a docstring"),
    ("check_docstrings", {"engine/a.py": DOC + "class A:\n    x = 1\n"}, "A needs a docstring"),
    (
        "check_docstrings",
        {
            "engine/a.py": DOC
            + 'class A:\n    """A."""\n\n    def f(self):\n        x = 1\n        return x\n'
        },
        "A.f needs a docstring",
    ),
    ("check_module_state", {"app/a.py": "cache = {}\n"}, "module state 'cache'"),
    (
        "check_module_state",
        {"app/a.py": "import collections\nrows: object = collections.deque()\n"},
        "'rows'",
    ),
    (
        "check_module_state",
        {"app/a.py": "CACHE = {}\ndef f(x):\n    CACHE[x] = 1\n"},
        "changes the module's CACHE",
    ),
    (
        "check_module_state",
        {"app/a.py": "SEEN = set()\ndef f(x):\n    SEEN.add(x)\n"},
        "changes the module's SEEN",
    ),
    ("check_marks", {"app/a.py": f"x = 1  # {MARK} later\n"}, MARK),
    ("check_marks", {"app/a.py": f"def f():\n    raise {shape.STUB}\n"}, "a stub"),
]

# Files that must pass every check.
FAIR = {
    "engine/__init__.py": "",
    "engine/errors.py": DOC + 'class E(Exception):\n    """An error."""\n',
    "engine/tree/a.py": DOC + "from engine.errors import E as E\n\nNAMES = {'a': 1}\n__all__ = ['E']\n",
    "engine/draft/b.py": DOC
    + "import torch\n\nimport engine.model.c\nfrom engine.tree.a import NAMES as NAMES\n",
    "engine/model/c.py": DOC + "from engine.model.config import SIZE as SIZE\n",
    "engine/model/config.py": DOC + "SIZE = 1\n",
    "engine/attention/registry.py": DOC
    + "from typing import Protocol\n\n"
    + 'class B(Protocol):\n    """A backend."""\n\n'
    + '    def run(self) -> int:\n        """Run."""\n        ...\n\n'
    + 'class C:\n    """One."""\n\n    def run(self) -> int:\n        x = 1\n        return x\n\n'
    + "    @property\n    def size(self) -> int:\n        x = 1\n        return x\n\n"
    + "    def obvious(self) -> int:\n        return 1\n\n"
    + "def _choose() -> object:\n    from engine.attention.triton import D\n\n    return D\n",
    "engine/attention/triton.py": DOC + "import triton as triton\n",
    "engine/weights/d.py": DOC + "def _read() -> object:\n    import safetensors\n\n    return safetensors\n",
    "app/cli.py": DOC + "def train() -> None:\n    import engine.training.e\n",
    "engine/training/e.py": DOC,
    "app/server.py": DOC
    + "from engine import Engine\n\ndef do_GET() -> None:\n    rows = []\n    rows.append(Engine)\n",
}


@pytest.fixture(scope="module")
def repository(request) -> SourceSet:
    return read_sources(request.config.rootpath, rules.SOURCE_FOLDERS)


def write(root, files) -> SourceSet:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_sources(root, rules.SOURCE_FOLDERS)


@pytest.mark.parametrize("name", CHECKS)
def test_repository_keeps_the_rule(name, repository):
    violations = list(CHECKS[name](repository))
    assert not violations, "\n" + "\n".join(violations)


@pytest.mark.parametrize(("name", "files", "expected"), BROKEN, ids=[f"{b[0]}-{b[2]}" for b in BROKEN])
def test_check_finds_the_one_violation(name, files, expected, tmp_path):
    violations = list(CHECKS[name](write(tmp_path, files)))
    assert len(violations) == 1, violations
    assert expected in violations[0]


@pytest.mark.parametrize("name", CHECKS)
def test_check_passes_fair_files(name, tmp_path):
    assert list(CHECKS[name](write(tmp_path, FAIR))) == []


def test_every_check_has_a_sample_that_breaks_it():
    assert {name for name, _, _ in BROKEN} == set(CHECKS)


def test_repository_was_found(repository):
    assert {"engine", "app", "ops", "loadtest"} <= repository.parts
    assert "engine.tree.topology" in repository.modules


def test_exceptions_are_needed_and_have_reasons(repository):
    dotted = {unit for unit in imports.PLACES if unit.count(".") > 1}
    assert dotted == set(rules.FLOOR_EXCEPTIONS)
    assert set(rules.LONG_FUNCTIONS) <= shape.long_functions(repository)
    reasons = [
        *rules.FLOOR_EXCEPTIONS.values(),
        *rules.LONG_FUNCTIONS.values(),
        *rules.LAZY_IMPORTERS.values(),
    ]
    assert all(len(reason.split()) >= 4 for reason in reasons)
