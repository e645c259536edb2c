"""Digests of model folders: what changes the network changes the digest, and nothing else does."""

import json

import pytest
import torch

from engine.errors import ModelLoadError
from engine.weights.digest import file_digest, folder_digest
from engine.weights.safetensors import write_safetensors
from engine.weights.shards import INDEX_FILE, SINGLE_FILE

CONFIG = {"hidden_size": 8, "rope_theta": 10000.0, "rope_scaling": None, "transformers_version": "4"}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(tmp_path / SINGLE_FILE, {"a": torch.ones(3), "b": torch.zeros(2)})
    return tmp_path


def test_file_digest_is_sha256(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    assert file_digest(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    with pytest.raises(ModelLoadError, match="gone"):
        file_digest(tmp_path / "gone")


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({}, True),
        ({"transformers_version": "5", "_name_or_path": "x", "torch_dtype": "float16"}, True),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, False),
        ({"rope_theta": 500000.0}, False),
        ({"hidden_size": 16}, False),
    ],
)
def test_only_network_settings_enter_the_digest(folder, changes, is_same):
    before = folder_digest(folder)
    reordered = dict(reversed((CONFIG | changes).items()))
    (folder / "config.json").write_text(json.dumps(reordered, indent=4))
    (folder / "tokenizer.json").write_text("{}")
    assert (folder_digest(folder) == before) is is_same


def test_one_changed_weight_changes_the_digest(folder):
    before = folder_digest(folder)
    write_safetensors(folder / SINGLE_FILE, {"a": torch.tensor([1.0, 1.0, 1.0000001]), "b": torch.zeros(2)})
    assert folder_digest(folder) != before


def test_every_shard_enters_the_digest(folder):
    (folder / SINGLE_FILE).unlink()
    for name in ("a", "b"):
        write_safetensors(folder / f"{name}.safetensors", {name: torch.ones(2)})
    index = {"weight_map": {name: f"{name}.safetensors" for name in ("a", "b")}}
    (folder / INDEX_FILE).write_text(json.dumps(index))
    digests = {folder_digest(folder)}
    for name in ("a", "b"):
        write_safetensors(folder / f"{name}.safetensors", {name: torch.zeros(2)})
        digests.add(folder_digest(folder))
    assert len(digests) == 3
