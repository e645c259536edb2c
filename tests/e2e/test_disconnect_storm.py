"""Clients that vanish, read slowly or are refused leave nothing behind; a short storm over a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.app.tiny_model import write_random_draft, write_random_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_short_storm_leaves_no_sequence_and_no_block_behind(tmp_path: Path) -> None:
    write_random_model(tmp_path)
    write_random_draft(tmp_path / "draft")
    folders = ["--model", tmp_path, "--draft", tmp_path / "draft"]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.disconnect_storm", "--seconds", "30", *folders],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"EYAS_CACHE": str(tmp_path / "cache")},
        check=False,
    )
    result = json.loads(run.stdout[run.stdout.index("{") :])
    broken = {name for name, holds in result["holds"].items() if not holds}
    assert broken <= {"memory grew by at most 2%"}, result  # it takes minutes to be flat
