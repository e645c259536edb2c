"""The memory plan of docs/deploy.md for one H100 of 80 GB is what the engine's own arithmetic says.

What a real card has free is left to the server, which prints its number of blocks.
"""

import re

import pytest
import torch

from engine.runner.memory import _CUDA_SHARE, bytes_per_block
from engine.runner.synthetic import eagle3_config, head_sizes, shape_of, target_sizes
from tests.k8s.rendered import ROOT, serve_config

GIB = 2**30
CARD_GIB = 79.6  # what an H100 of 80 GB reports
CONTEXT_GIB = 1.0  # CUDA's own, and libraries
BLOCK = 64
MODEL = shape_of("llama-3.1-8b")
HEAD = eagle3_config(MODEL)


def num_tokens(has_draft: bool) -> int:
    """Cached tokens that fit, at 2 bytes an element."""
    weights = 2 * target_sizes(MODEL, 2).num_kept
    weights += 2 * head_sizes(HEAD, 2).num_kept if has_draft else 0
    free = (CARD_GIB - CONTEXT_GIB) * GIB - weights
    per_token = bytes_per_block(BLOCK, MODEL, HEAD if has_draft else None, torch.bfloat16) / BLOCK
    return int(free * _CUDA_SHARE / per_token)


def plan() -> dict[int, tuple[int, ...]]:
    """The table of the document: context to sequences without a draft, with one, and with fp8 K/V."""
    text = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d[\d,]*) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    return {int(row[0].replace(",", "")): tuple(int(cell) for cell in row[1:]) for row in rows}


@pytest.mark.parametrize("context", [1024, 2048, 4096, 8192, 16384])
def test_the_plan_is_what_the_engine_would_plan(context):
    plain, drafted = (num_tokens(has_draft) // context for has_draft in (False, True))
    assert plan()[context] == (plain, drafted, 2 * num_tokens(has_draft=True) // context)


def test_the_overlay_asks_for_a_context_of_the_plan():
    (application,) = serve_config("h100")["applications"]
    engine = application["args"]["engine"]
    assert engine["max_model_len"] in plan()
    assert engine["max_num_seqs"] <= plan()[4096][1], "typical contexts must fit without preemption"
