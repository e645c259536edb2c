"""Rules that ruff and mypy check stay switched on: annotations, complexity, print, relative imports.

What they do not know is left to `test_rules`.
"""

import subprocess
import sys
import tomllib

import pytest

from tests.architecture import rules


def lint(root, name, text) -> str:
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise"]
    command += ["--stdin-filename", name, "-"]
    return subprocess.run(
        command, cwd=root, input=text, capture_output=True, text=True, timeout=60, check=False
    ).stdout


@pytest.mark.parametrize("code", rules.RUFF_SAMPLES)
@pytest.mark.parametrize("folder", ["engine", "app", "ops", "loadtest"])
def test_ruff_finds_the_sample(code, folder, pytestconfig):
    assert code in lint(pytestconfig.rootpath, f"{folder}/sample.py", rules.RUFF_SAMPLES[code])


def test_the_command_line_may_print(pytestconfig):
    assert "T201" not in lint(pytestconfig.rootpath, "app/cli.py", rules.RUFF_SAMPLES["T201"])


def test_mypy_is_strict_on_every_part(pytestconfig):
    config = tomllib.loads((pytestconfig.rootpath / "pyproject.toml").read_text())["tool"]["mypy"]
    assert config["strict"] is True
    assert set(config["packages"]) == {"app", "engine", "ops", "loadtest"}
