"""Schemathesis, an independent reader of the OpenAPI document, finds no failure and no broken promise."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI

from tests.app.harness import serving

# A body can keep to the document and still be refused: token ids and lengths depend on the model.
EXCLUDED = "positive_data_acceptance"


@pytest.fixture
def url(application: FastAPI) -> Iterator[str]:
    with serving(application) as address:
        yield address


@pytest.mark.parametrize(
    ("max_examples", "num_cases"), [(5, 300), pytest.param(250, 2000, marks=pytest.mark.slow)]
)
def test_no_case_fails_the_server_or_breaks_the_document(
    url: str, tmp_path: Path, max_examples: int, num_cases: int
) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--no-color"]
    command += ["--phases", "coverage,fuzzing", "--max-examples", str(max_examples)]
    command += [
        "--exclude-checks",
        EXCLUDED,
        "--continue-on-failure",
        "--generation-database",
        "none",
        "--seed",
        "1",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    generated = re.search(r"(\d+) generated", done.stdout)
    assert generated is not None, done.stdout
    assert int(generated[1]) >= num_cases
