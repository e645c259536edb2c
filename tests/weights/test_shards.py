"""Weights in one file or in several, and the index that must agree with them."""

import json

import pytest
import torch

from engine.errors import ModelLoadError
from engine.weights.safetensors import write_safetensors
from engine.weights.shards import INDEX_FILE, SINGLE_FILE, list_names, open_weights, weight_files

TENSORS = {"a": torch.zeros(2), "b": torch.ones(3), "c": torch.full((4,), 2.0)}
SHARDS = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}


@pytest.fixture
def sharded(tmp_path):
    for file_name in set(SHARDS.values()):
        write_safetensors(
            tmp_path / file_name,
            {name: TENSORS[name] for name, owner in SHARDS.items() if owner == file_name},
        )
    write_index(tmp_path, SHARDS)
    return tmp_path


def write_index(folder, weight_map):
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_read_like_one_file(sharded, tmp_path_factory):
    single = tmp_path_factory.mktemp("single")
    write_safetensors(single / SINGLE_FILE, TENSORS)
    for folder in (sharded, single):
        source = open_weights(folder)
        assert source.names() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert source.shape(name) == tuple(tensor.shape)
            assert torch.equal(source.read(name), tensor)
    assert [path.name for path in weight_files(sharded)] == ["model-1.safetensors", "model-2.safetensors"]
    assert [path.name for path in weight_files(single)] == [SINGLE_FILE]


def test_a_shard_that_lacks_an_indexed_tensor_is_refused(sharded):
    write_index(sharded, SHARDS | {"d": "model-1.safetensors"})
    with pytest.raises(ModelLoadError, match=r"model-1\.safetensors lacks .*: d"):
        open_weights(sharded)


def test_a_shard_with_an_unlisted_tensor_is_refused(sharded):
    write_index(sharded, {name: file for name, file in SHARDS.items() if name != "b"})
    with pytest.raises(ModelLoadError, match=r"model-2\.safetensors holds .*: b"):
        open_weights(sharded)


def test_a_missing_shard_is_named(sharded):
    (sharded / "model-2.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-2\.safetensors"):
        open_weights(sharded)


@pytest.mark.parametrize(
    "file_name", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", 3, "\0.safetensors"]
)
def test_an_index_cannot_point_outside_its_folder(tmp_path, file_name):
    write_index(tmp_path, {"a": file_name})
    with pytest.raises(ModelLoadError, match="plain file name"):
        open_weights(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_a_corrupt_index_is_refused(tmp_path, text):
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(ModelLoadError, match=r"index\.json must"):
        open_weights(tmp_path)


def test_pickled_weights_are_not_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelLoadError, match="safetensors only"):
        open_weights(tmp_path)


def test_long_lists_of_names_are_cut():
    assert list_names("cab") == "a, b, c"
    assert list_names("gfedcba") == "a, b, c, d, e and 2 more"
