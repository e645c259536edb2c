"""A worker is built from folders, says what the machine answered, and refuses what does not belong
together.
"""

import pytest
import torch

from engine.config import EngineConfig, SpeculationConfig
from engine.draft.head import DraftHead
from engine.draft.loader import save_draft
from engine.errors import ConfigError, DraftMismatchError, ModelLoadError
from engine.model.config import ModelConfig
from engine.runner.worker import build_worker, load_target
from engine.weights.digest import file_digest, folder_digest
from engine.weights.safetensors import SafetensorsFile, write_safetensors
from tests.draft.tiny_head import make_draft_config
from tests.model.paged_model import CPU, TINY, save_tiny_llama


@pytest.fixture(autouse=True)
def keep_threads():
    """A worker sets the threads of its process; the tests after it want theirs back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    save_tiny_llama(folder)
    return folder


@pytest.fixture
def save_head(model, tmp_path):
    """Return a function that saves a random draft for the tiny target and returns its folder."""

    def save(trees=None, **changes):
        config = make_draft_config(**({"base_model_digest": folder_digest(model)} | changes))
        save_draft(DraftHead(config, num_positions=8, dtype=torch.float32), tmp_path, {}, trees)
        return tmp_path

    return save


def make_config(model, **changes):
    return EngineConfig(
        model=model, **({"dtype": "float32", "num_threads": 1, "num_blocks": 40, "max_num_seqs": 4} | changes)
    )


def test_facts_say_what_was_built(model):
    facts = build_worker(make_config(model)).facts
    assert (facts.model_folder, facts.model_digest) == (str(model), folder_digest(model))
    assert (facts.draft_digest, facts.trees) == (None, ("off",))
    assert (facts.dtype, facts.device, facts.attention_backend) == ("float32", "cpu", "cpu")
    assert (facts.vocab_size, facts.eos_token_ids) == (TINY["vocab_size"], (TINY["eos_token_id"],))
    assert (facts.num_blocks, facts.block_size, facts.max_num_seqs) == (40, 16, 4)
    assert facts.max_model_len == TINY["max_position_embeddings"]


def test_threads_asked_for_are_set(model):
    assert build_worker(make_config(model, num_threads=2)).facts.num_threads == 2
    assert torch.get_num_threads() == 2


def test_with_a_draft_every_tree_that_the_window_holds_is_there(model, save_head):
    folder = save_head()
    worker = build_worker(make_config(model, draft=folder, speculation=SpeculationConfig(feature_window=4)))
    assert worker.library.max_depth == 3
    assert {"off", "tree-8", "tree-64", "chain-1", "chain-3"} <= set(worker.facts.trees)
    assert "chain-4" not in worker.facts.trees
    assert all(worker.library.get(name).depth <= 3 for name in worker.facts.trees)
    assert worker.facts.draft_digest == file_digest(folder / "model.safetensors")


def test_trees_shipped_with_a_draft_replace_the_searched_ones(model, save_head):
    worker = build_worker(make_config(model, draft=save_head(trees='{"tree-3": [-1, 0, 0]}')))
    assert worker.library.names == ("off", "tree-3")


def test_a_tree_wider_than_the_draft_vocabulary_is_refused(model, save_head):
    trees = '{"tree-4": [-1, 0, 0, 0]}'
    with pytest.raises(ConfigError, match="tree-4 has nodes of 3 children, but the draft has 2 tokens"):
        build_worker(make_config(model, draft=save_head(trees=trees, draft_vocab_size=2)))
    worker = build_worker(make_config(model, draft=save_head(trees=trees, draft_vocab_size=3)))
    assert worker.library.get("tree-4").max_rank == 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"target_vocab_size": 321}, "vocabulary size"),
        ({"target_num_layers": 4}, "number of layers"),
        ({"hidden_size": 96, "target_hidden_size": 96}, "hidden size"),
        ({"base_model_digest": "of another"}, "of another"),
    ],
)
def test_a_draft_for_another_target_is_refused(model, save_head, changes, named):
    with pytest.raises(DraftMismatchError, match=named):
        build_worker(make_config(model, draft=save_head(**changes)))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_model_len": TINY["max_position_embeddings"] + 1}, "max_model_len"),
        ({"attention_backend": "flash"}, "attention_backend"),
        ({"num_blocks": None, "memory_gib": 1e-6}, "memory_gib"),
    ],
)
def test_what_the_model_or_machine_cannot_give_is_refused(model, changes, named):
    with pytest.raises(ConfigError, match=named):
        build_worker(make_config(model, **changes))


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        build_worker(make_config(tmp_path))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), r"lack 1 tensors: model\.norm\.weight"),
        (lambda tensors: tensors.update(surplus=torch.zeros(1)), "1 unknown tensors: surplus"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(47)}), "must have shape"),
    ],
    ids=["missing", "surplus", "misshapen"],
)
def test_weights_that_do_not_fit_the_config_are_named(tmp_path, change, named):
    save_tiny_llama(tmp_path)
    file = SafetensorsFile(tmp_path / "model.safetensors")
    tensors = {name: file.read(name).clone() for name in file.names()}
    change(tensors)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ModelLoadError, match=named):
        build_worker(make_config(tmp_path))


def test_a_loaded_target_is_frozen_and_has_the_dtype_asked_for(model):
    target = load_target(model, ModelConfig.load(model), (0,), 8, torch.bfloat16, CPU)
    assert not target.training
    assert all(p.dtype is torch.bfloat16 and not p.requires_grad for p in target.parameters())
