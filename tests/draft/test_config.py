"""A draft's config is read back as written, refused where it cannot be built, and tied to one target."""

import dataclasses
import json

import pytest

from engine.draft.config_file import load_config, save_config
from engine.errors import DraftMismatchError, ModelLoadError
from engine.model.config import ModelConfig
from tests.draft.tiny_head import make_draft_config
from tests.model.paged_model import TINY

WITHOUT = "(without)"  # removes the key
TARGET = ModelConfig.from_hf(TINY | {"architectures": ["LlamaForCausalLM"], "rope_parameters": None})


def write(path, **changes):
    raw = json.loads(json.dumps(dataclasses.asdict(make_draft_config()))) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not WITHOUT}))
    return path


@pytest.mark.parametrize(
    "changes",
    [{}, {"rope_scaling": None}, {"base_model_digest": None}, {"taps": (3,)}, {"is_feedback_normed": True}],
    ids=str,
)
def test_what_is_saved_is_loaded(tmp_path, changes):
    config = make_draft_config(**changes)
    save_config(config, tmp_path / "config.json")
    assert load_config(tmp_path / "config.json") == config


def test_features_are_the_taps_side_by_side_and_the_first_layer_reads_two_widths():
    config = make_draft_config(taps=(0, 2))
    assert config.feature_size == 2 * 48
    assert [config.layer_shape(idx).input_size for idx in range(2)] == [96, 48]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"num_layers": 4}, "1 to 3 layers"),
        ({"num_layers": "2"}, "num_layers"),
        ({"num_layers": True}, "num_layers"),
        ({"intermediate_size": "64"}, "intermediate_size"),
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"num_heads": 3}, "num_kv_heads"),
        ({"head_dim": 11}, "head_dim"),
        ({"hidden_size": 64}, "hidden_size"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_theta": "1e4"}, 'rope_theta must be a positive number, found "1e4"'),
        ({"rope_theta": None}, "rope_theta .* found null"),
        ({"rope_theta": True}, "rope_theta .* found true"),
        ({"rms_norm_eps": [1]}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"head_dim": 0}, "head_dim must be an integer of at least 1, found 0"),
        ({"head_dim": 2.5}, "head_dim"),
        ({"head_dim": None}, "head_dim"),
        ({"num_kv_heads": {}}, "num_kv_heads"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"max_position": 1e3}, "max_position"),
        ({"max_position": 2**31}, "max_position"),
        ({"target_num_layers": "3"}, "target_num_layers"),
        ({"taps": []}, "taps"),
        ({"taps": [4]}, "taps"),
        ({"taps": [-1]}, "taps"),
        ({"taps": [0.5]}, "taps"),
        ({"taps": "012"}, "taps"),
        ({"taps": WITHOUT}, "taps"),
        ({"taps": 1}, "taps must be a list"),
        ({"taps": None}, "taps must be a list"),
        ({"taps": [True]}, "taps"),
        ({"taps": [2.0]}, "taps"),
        ({"taps": [[1]]}, "taps"),
        ({"taps": [0] * 50 + [-1]}, r"taps must be .* found .*\.\.\."),
        ({"draft_vocab_size": 0}, "draft_vocab_size"),
        ({"draft_vocab_size": 321}, "draft_vocab_size"),
        ({"is_feedback_normed": "no"}, "is_feedback_normed"),
        ({"rope_scaling": WITHOUT}, "rope_scaling"),
        ({"rope_scaling": {"kind": "yarn"}}, "rope_scaling needs factor"),
        ({"rope_scaling": 5}, "rope_scaling must be an object or null, found 5"),
        ({"rope_scaling": 0}, "rope_scaling must be an object or null, found 0"),
        ({"rope_scaling": []}, "rope_scaling"),
        ({"rope_scaling": "llama3"}, "rope_scaling"),
        ({"base_model_digest": 7}, "base_model_digest"),
        ({"head_dim": WITHOUT}, "head_dim"),
        ({"temperature": 1.0}, "temperature"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_built_is_refused_by_name(tmp_path, changes, named):
    with pytest.raises(ModelLoadError, match=named) as caught:
        load_config(write(tmp_path / "config.json", **changes))
    assert str(caught.value).startswith(str(tmp_path / "config.json"))
    assert "\n" not in str(caught.value)
    for word in ("__init__", "argument", "NoneType", "'str'", "'int'"):
        assert word not in str(caught.value), "the wording of Python"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kind": "yarn"}, "kind"),
        ({"kind": ["llama3"]}, "kind"),
        ({"factor": "8"}, "rope_scaling.factor"),
        ({"factor": 0.5}, "factor"),
        ({"low_freq_factor": None}, "rope_scaling.low_freq_factor"),
        ({"high_freq_factor": float("inf")}, "rope_scaling.high_freq_factor"),
        ({"original_max_position": 0}, "rope_scaling.original_max_position"),
        ({"original_max_position": WITHOUT}, "original_max_position"),
        ({"rope_type": "llama3"}, "rope_type"),
    ],
    ids=str,
)
def test_a_wrong_rope_scaling_is_refused_by_name_in_one_line(tmp_path, changes, named):
    scaling = dataclasses.asdict(make_draft_config().rope_scaling) | changes
    scaling = {key: value for key, value in scaling.items() if value is not WITHOUT}
    with pytest.raises(ModelLoadError, match=named) as caught:
        load_config(write(tmp_path / "config.json", rope_scaling=scaling))
    assert str(caught.value).startswith(str(tmp_path / "config.json"))


def test_a_rope_kind_that_no_network_knows_is_refused(tmp_path):
    scaling = dataclasses.asdict(make_draft_config().rope_scaling) | {"kind": "yarn"}
    with pytest.raises(ModelLoadError, match="yarn"):
        load_config(write(tmp_path / "config.json", rope_scaling=scaling))


@pytest.mark.parametrize("text", [None, "", "{", "[]", "null"])
def test_an_unreadable_config_names_its_file(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_config(tmp_path / "config.json")


@pytest.mark.parametrize("digests", [("base", "base"), (None, "other"), ("base", None), (None, None)])
def test_a_target_of_the_same_sizes_and_weights_fits(digests):
    make_draft_config(base_model_digest=digests[0]).check_target(TARGET, digests[1])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 96, "target_hidden_size": 96}, "hidden size 96, this target has 48"),
        ({"target_vocab_size": 321}, "vocabulary size 321, this target has 320"),
        ({"max_position": 128}, f"max_position 128, this target has {TARGET.max_position}"),
        ({"target_num_layers": 5}, "number of layers 5, this target has 3"),
        ({"base_model_digest": "other"}, "other, these weights are base"),
    ],
)
def test_another_target_is_refused_by_the_first_difference(changes, named):
    with pytest.raises(DraftMismatchError, match=named):
        make_draft_config(**changes).check_target(TARGET, "base")
