"""A draft folder is read back as saved, and whatever is wrong with one is named."""

import json

import pytest
import torch

from engine.draft.head import DraftHead
from engine.draft.loader import load_draft, save_draft
from engine.errors import ConfigError, DraftMismatchError, ModelLoadError
from engine.tree.library import DEFAULT_PROFILE
from engine.weights.digest import file_digest
from engine.weights.safetensors import SafetensorsFile, write_safetensors
from tests.draft.tiny_head import make_draft_config

VOCAB, HIDDEN = 320, 48
ROWS = torch.randn(2, VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def head():
    torch.manual_seed(0)
    head = DraftHead(make_draft_config(), num_positions=8, dtype=torch.float32)
    head.target_ids.copy_(torch.randperm(VOCAB)[: head.config.draft_vocab_size])
    return head


@pytest.fixture
def folder(tmp_path, head):
    save_draft(head, tmp_path, {"source": "a test"}, trees='{"tree-3": [-1, 0, 0]}\n')
    return tmp_path


def build(folder):
    return load_draft(folder).build(*ROWS, 8, torch.float32, torch.device("cpu"))


def rewrite(folder, change):
    """Change the tensors of a folder and state their new digest, as a faulty writer would."""
    file = SafetensorsFile(folder / "model.safetensors")
    tensors = {name: file.read(name).clone() for name in file.names()}
    change(tensors)
    write_safetensors(folder / "model.safetensors", tensors)
    edit_manifest(folder, **{"model.safetensors": file_digest(folder / "model.safetensors")})


def edit_manifest(folder, **files):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {k: v for k, v in (manifest["files"] | files).items() if v is not None}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_what_is_saved_is_loaded_in_bfloat16(folder, head):
    built = build(folder)
    assert built.config == head.config
    state = built.state_dict()
    assert state.keys() == head.state_dict().keys()
    for name, value in head.state_dict().items():
        expected = value.bfloat16().float() if value.is_floating_point() else value
        assert torch.equal(state[name], expected), name


def test_a_built_head_is_bound_frozen_and_ready(folder, head):
    built = build(folder)
    assert torch.equal(built.head_rows, ROWS[1][head.target_ids])
    assert built.embed_rows.data_ptr() == ROWS[0].data_ptr()
    assert not built.training
    assert not any(parameter.requires_grad for parameter in built.parameters())


def test_the_manifest_keeps_its_source_and_the_digest_is_that_of_the_weights(folder):
    draft = load_draft(folder)
    assert json.loads((folder / "manifest.json").read_text())["source"] == "a test"
    assert draft.digest == file_digest(folder / "model.safetensors")
    assert draft.trees == folder / "trees.json"


def test_a_folder_without_trees_has_none(tmp_path, head):
    save_draft(head, tmp_path, {})
    assert load_draft(tmp_path).trees is None


def test_the_acceptance_in_the_manifest_is_that_of_the_draft(tmp_path, head):
    save_draft(head, tmp_path, {})
    assert load_draft(tmp_path).profile == DEFAULT_PROFILE
    stated = {"source": "a test", "probabilities": [[0.6, 0.2], [0.5, 0.1]]}
    save_draft(head, tmp_path, {"acceptance_profile": stated})
    assert load_draft(tmp_path).profile == ((0.6, 0.2), (0.5, 0.1))
    save_draft(head, tmp_path, {"acceptance_profile": stated | {"probabilities": [[0.6, 0.7]]}})
    with pytest.raises(ConfigError):
        load_draft(tmp_path)


def test_saving_twice_gives_the_same_bytes(tmp_path, folder, head):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    save_draft(head, tmp_path, {"source": "a test"}, trees='{"tree-3": [-1, 0, 0]}\n')
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_save_that_breaks_off_leaves_no_manifest(folder, head):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(OSError, match="model"):
        save_draft(head, folder, {})
    with pytest.raises(ModelLoadError, match=r"manifest\.json"):
        load_draft(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "trees.json"])
def test_one_changed_byte_is_noticed_in_every_file(folder, name):
    content = bytearray((folder / name).read_bytes())
    content[-2] ^= 1
    (folder / name).write_bytes(bytes(content))
    with pytest.raises(ModelLoadError, match=rf"{name} has sha256"):
        load_draft(folder)


@pytest.mark.parametrize("name", ["manifest.json", "config.json", "model.safetensors", "trees.json"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(ModelLoadError, match=name):
        load_draft(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_manifest_must_name_what_a_draft_needs(folder, name):
    edit_manifest(folder, **{name: None})
    with pytest.raises(ModelLoadError, match="must name the sha256"):
        load_draft(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": []}', '{"files": null}'])
def test_a_manifest_that_is_none_is_refused(folder, text):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"manifest\.json"):
        load_draft(folder)


def test_a_truncated_weights_file_is_refused_even_with_its_digest(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    edit_manifest(folder, **{"model.safetensors": file_digest(weights)})
    with pytest.raises(ModelLoadError, match="truncated"):
        build(folder)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop("fc.weight"), "lack 1 tensors: fc.weight"),
        (lambda tensors: tensors.update(head_rows=torch.zeros(1)), "1 unknown tensors: head_rows"),
        (lambda tensors: tensors.update({"norm.weight": torch.zeros(47)}), r"norm\.weight must have shape"),
        (lambda tensors: tensors.update(target_ids=torch.zeros(40)), "target_ids must be stored as"),
        (lambda tensors: tensors["target_ids"][:2].fill_(7), "twice"),
    ],
    ids=["missing", "surplus", "misshapen", "ill-typed", "duplicate"],
)
def test_weights_that_do_not_fit_are_named(folder, change, named):
    rewrite(folder, change)
    with pytest.raises(ModelLoadError, match=named):
        build(folder)


@pytest.mark.parametrize("token_id", [-1, VOCAB, 2**40])
def test_a_vocabulary_map_beyond_the_target_is_refused(folder, token_id):
    rewrite(folder, lambda tensors: tensors["target_ids"][3:4].fill_(token_id))
    with pytest.raises(DraftMismatchError, match=rf"0\.\.{VOCAB - 1}"):
        build(folder)


def test_the_last_token_of_the_target_may_be_drafted(folder):
    rewrite(folder, lambda tensors: tensors["target_ids"].copy_(torch.arange(VOCAB - 40, VOCAB)))
    assert torch.equal(build(folder).head_rows, ROWS[1][-40:])
