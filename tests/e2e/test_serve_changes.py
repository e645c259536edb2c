"""A deployment of two replicas changes under load: a draft is replaced, then a replica is killed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.draft.head import DraftHead
from engine.draft.loader import load_draft, save_draft
from tests.app.tiny_model import MAX_POSITION, write_random_draft, write_random_model

pytestmark = pytest.mark.e2e


def test_without_names_all_scenes_are_played_and_an_unknown_one_is_refused() -> None:
    """In a process of its own: importing Ray Serve warns, which is an error here."""
    lines = (
        "from benchmarks.serve_changes import SCENES, parse",
        "folders = '--model m --draft d --other-draft o'.split()",
        "assert parse(folders).scenes == list(SCENES)",
        "assert parse(['kill', *folders]).scenes == ['kill']",
        "parse(['kil', *folders])",
    )
    run = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 2, run.stderr
    assert "no scene is called kil: there are " in run.stderr


def test_a_draft_is_replaced_and_a_replica_killed_under_load(tmp_path: Path) -> None:
    write_random_model(tmp_path)
    write_random_draft(tmp_path / "draft")
    torch.manual_seed(9)
    other = DraftHead(load_draft(tmp_path / "draft").config, num_positions=MAX_POSITION, dtype=torch.float32)
    save_draft(other, tmp_path / "other", {})
    folders = ["--model", tmp_path, "--draft", tmp_path / "draft", "--other-draft", tmp_path / "other"]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.serve_changes", "redeploy", "kill", "--streams", "12", *folders],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"EYAS_CACHE": str(tmp_path / "cache")},
    )
    assert run.returncode == 0, run.stderr
    redeployed, killed = (json.loads(line) for line in run.stdout.splitlines() if line.startswith("{"))
    assert set(redeployed["ends"]) == {"whole"}, redeployed["errors"]
    assert redeployed["seeds_with_two_texts"] == 0
    assert redeployed["swaps"] == [2, 2]
    assert redeployed["blocks_conserved"]
    assert set(killed["ends"]) == {"whole", "one error event"}, killed["errors"]
    assert killed["seeds_with_two_texts"] == 0
    assert killed["ends"]["one error event"] <= 12
    assert killed["seconds_to_next_answer"] < 6, "three health checks"
    assert killed["blocks_conserved"]
