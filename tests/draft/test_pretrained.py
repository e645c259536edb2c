"""The shipped head is whole, small, and made for the shipped model."""

import json
from pathlib import Path

import pytest
import torch

import engine.draft
from engine.draft.loader import load_draft
from engine.tree.library import TreeLibrary

FOLDER = Path(engine.draft.__file__).parent / "pretrained" / "smollm2"


@pytest.fixture(scope="module")
def draft():
    return load_draft(FOLDER)


def test_the_folder_is_at_most_25_megabytes():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 25_000_000


def test_every_tensor_has_its_place_and_the_vocabulary_is_the_models(draft):
    config = draft.config
    rows = torch.zeros(config.target_vocab_size, config.hidden_size, dtype=torch.bfloat16)
    head = draft.build(rows, rows, 64, torch.bfloat16, torch.device("cpu"))
    assert all(value.isfinite().all() for value in head.parameters())
    assert head.head_rows.shape == (config.draft_vocab_size, config.hidden_size)
    assert {1, 2} & set(head.target_ids.tolist()) == {2}  # a draft can end an answer, not begin a message


def test_the_trees_are_those_of_its_acceptance_profile(draft):
    manifest = json.loads((FOLDER / "manifest.json").read_text())
    profile = manifest["acceptance_profile"]["probabilities"]
    shipped, searched = TreeLibrary.load(draft.trees), TreeLibrary.search(profile)
    assert shipped.names == searched.names
    assert all(shipped.get(name) == searched.get(name) for name in shipped.names)


def test_the_measured_tokens_per_call_meet_the_goal():
    measured = json.loads((FOLDER / "manifest.json").read_text())["measured"]["mt_bench_first_turns"]
    assert measured["chain-3"] >= 1.8
    assert measured["tree-16"] >= 2.1
