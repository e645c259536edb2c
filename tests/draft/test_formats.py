"""Heads of other projects compute what their descriptions say, and survive the way out and in again."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.draft.exchange import export_draft, import_draft
from engine.draft.loader import load_draft
from engine.errors import ConfigError, DraftMismatchError, EyasError, ModelLoadError
from engine.model.config import ModelConfig
from tests.draft.checkpoints import (
    DRAFT_VOCAB,
    HIDDEN,
    NUM_TAPS,
    VOCAB,
    eagle1_oracle,
    eagle3_oracle,
    linear,
    write_eagle1,
    write_eagle3,
    write_speculators,
)
from tests.layers.plain import attend_causally
from tests.model.paged_model import save_tiny_llama

NUM_LAYERS = 8
FLAGS = [
    {},
    {"norm_output": True, "norm_before_residual": True, "norm_before_fc": True},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_residual": True},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    save_tiny_llama(folder, num_hidden_layers=NUM_LAYERS)
    return folder


def built(model, draft):
    """Return (head, target embedding, target output rows) in float32."""
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    head = load_draft(draft).build(embedding, embedding, 64, torch.float32, torch.device("cpu"))
    return head, embedding


def compare(head, embedded_rows, output_rows, oracle, feature_size):
    """Run pairs (feature of i, token of i + 1) through both, then the first output fed back."""
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(0, VOCAB, (7,), generator=generator)
    features = torch.randn(7, feature_size, generator=generator)
    attend = attend_causally(head.config.num_kv_heads)
    # Our pairs stand one position later than the descriptions count: rotary positions are relative.
    feature, hidden = head(token_ids, head.fuse(features), torch.arange(1, 8), attend)
    fed_back, expected = oracle(embedded_rows[token_ids].double(), features.double(), torch.arange(7))
    torch.testing.assert_close(feature.double(), fed_back, atol=1e-4, rtol=1e-3)
    logits = linear(expected, output_rows)
    torch.testing.assert_close(head.logits(hidden).double(), logits, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("num_layers", "has_bias"), [(1, True), (1, False), (3, True)])
def test_an_eagle1_head_is_its_description(model, tmp_path, num_layers, has_bias):
    tensors = write_eagle1(tmp_path / "in", num_layers, has_bias)
    assert import_draft(tmp_path / "in", model, tmp_path / "out", "inputs") == "eagle1"
    head, embedding = built(model, tmp_path / "out")
    assert head.config.taps == (NUM_LAYERS,)
    assert head.config.rope_theta == 500000.0

    def oracle(embedded, state, positions):
        return eagle1_oracle(tensors, embedded, state, positions, num_layers)

    compare(head, embedding, embedding, oracle, HIDDEN)


@pytest.mark.parametrize("hidden", [HIDDEN, 32])
@pytest.mark.parametrize("has_tap_norms", [False, True])
def test_an_eagle3_head_is_its_description(model, tmp_path, hidden, has_tap_norms):
    tensors = write_eagle3(tmp_path / "in", hidden, has_tap_norms)
    assert import_draft(tmp_path / "in", model, tmp_path / "out", "inputs") == "eagle3"
    head, embedding = built(model, tmp_path / "out")
    assert head.config.taps == (1, 3, 4), "the states that enter layers 2, L // 2 and L - 3"
    assert head.config.rope_theta == 10000.0, "a config that is silent means the default, not the target's"
    assert head.target_ids.tolist() == tensors["t2d"].nonzero()[:, 0].tolist(), "d2t holds offsets"

    def oracle(embedded, taps, positions):
        return eagle3_oracle(tensors, embedded, taps, positions)

    own = tensors.get("embed_tokens.weight", embedding)
    compare(head, own, tensors["lm_head.weight"], oracle, NUM_TAPS * HIDDEN)


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "+".join(flags) or "plain")
@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_speculators_head_is_its_description(model, tmp_path, flags, num_layers):
    tensors = write_speculators(tmp_path / "in", num_layers, **flags)
    assert import_draft(tmp_path / "in", model, tmp_path / "out", "inputs") == "speculators"
    head, embedding = built(model, tmp_path / "out")

    def oracle(embedded, taps, positions):
        return eagle3_oracle(tensors, embedded, taps, positions, "layers.0", num_layers=num_layers, **flags)

    compare(head, embedding, tensors["lm_head.weight"], oracle, NUM_TAPS * HIDDEN)


@pytest.mark.parametrize(
    ("write", "kind"),
    [
        (lambda folder: write_eagle1(folder, 2), "eagle1"),
        (write_eagle3, "eagle3"),
        (lambda folder: write_eagle3(folder, 32, has_tap_norms=True), "eagle3"),
        (lambda folder: write_eagle3(folder, dtype=torch.float16), "eagle3"),
        (lambda folder: write_speculators(folder, 3, **FLAGS[1]), "speculators"),
        (lambda folder: write_speculators(folder, fc_norm=True), "speculators"),
    ],
)
def test_a_head_comes_out_as_it_went_in(model, tmp_path, write, kind):
    tensors = write(tmp_path / "in")
    import_draft(tmp_path / "in", model, tmp_path / "draft", "inputs")
    export_draft(tmp_path / "draft", model, tmp_path / "out", kind, 3)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, value in tensors.items():
        assert written[name].dtype == value.dtype, name
        assert torch.equal(written[name], value), name
    import_draft(tmp_path / "out", model, tmp_path / "again", "inputs")
    first, second = (load_draft(tmp_path / name).config for name in ("draft", "again"))
    assert first == second


def test_a_full_vocabulary_needs_no_map(model, tmp_path):
    write_speculators(tmp_path / "in", has_vocabulary=False)
    import_draft(tmp_path / "in", model, tmp_path / "out", "inputs")
    assert built(model, tmp_path / "out")[0].target_ids.tolist() == list(range(VOCAB))


@pytest.mark.parametrize(("convention", "taps"), [("inputs", (0, 3, 6)), ("outputs", (1, 4, 7))])
@pytest.mark.parametrize("is_nested", [False, True])
def test_listed_taps_are_read_by_the_named_convention(model, tmp_path, convention, taps, is_nested):
    listed = {"eagle_aux_hidden_state_layer_ids": [1, 4, 7]}
    write_eagle3(tmp_path / "in", **({"eagle_config": listed} if is_nested else listed))
    import_draft(tmp_path / "in", model, tmp_path / "out", convention)
    assert load_draft(tmp_path / "out").config.taps == taps


def test_names_may_carry_a_prefix_and_weights_may_be_pickled(model, tmp_path):
    tensors = write_eagle3(tmp_path / "in")
    (tmp_path / "in" / "model.safetensors").unlink()
    torch.save({f"model.{name}": value for name, value in tensors.items()}, tmp_path / "in/pytorch_model.bin")
    assert import_draft(tmp_path / "in", model, tmp_path / "out", "inputs") == "eagle3"


def test_pickled_code_is_not_run(model, tmp_path):
    write_eagle3(tmp_path / "in")
    (tmp_path / "in" / "model.safetensors").unlink()
    torch.save({"fc.weight": NUM_TAPS.__class__, "print": print}, tmp_path / "in/pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="as tensors"):
        import_draft(tmp_path / "in", model, tmp_path / "out", "inputs")


def edit(folder, drop=(), add=None, config=None):
    """Change the tensors and the config of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if name not in drop} | (add or {})
    save_file(kept, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop": ["fc.weight"]}, "fc.weight"),
        ({"drop": ["midlayer.mlp.up_proj.weight"]}, "up_proj"),
        ({"add": {"midlayer.self_attn.q_norm.weight": torch.ones(3)}}, "does not explain"),
        ({"add": {"norm.weight": torch.ones(HIDDEN + 1)}}, "norm.weight must have shape"),
        ({"add": {"d2t": torch.zeros(DRAFT_VOCAB + 1, dtype=torch.int64)}}, "offsets"),
        ({"add": {"d2t": torch.full((DRAFT_VOCAB,), VOCAB)}}, "target_ids"),
        ({"add": {"d2t": -torch.arange(DRAFT_VOCAB)}}, "twice"),
        ({"config": {"vocab_size": VOCAB - 1}}, "vocabulary size"),
        ({"config": {"target_hidden_size": 99}}, "hidden size 99"),
        ({"config": {"hidden_size": 20}}, "hidden_size"),
        ({"config": {"attention_bias": True}}, "biases"),
        ({"config": {"eagle_aux_hidden_state_layer_ids": [0, 4, 7]}}, "taps"),
        ({"config": {"eagle_aux_hidden_state_layer_ids": "all"}}, "layer indices"),
        ({"config": {"rope_scaling": {"rope_type": "yarn"}}}, "rope_type"),
        ({"config": {"speculators_model_type": "mlp"}}, "eagle3"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_a_clear_error(model, tmp_path, change, message):
    write_eagle3(tmp_path / "in")
    edit(tmp_path / "in", **change)
    with pytest.raises((ModelLoadError, DraftMismatchError), match=message):
        import_draft(tmp_path / "in", model, tmp_path / "out", "inputs")
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(model, tmp_path, name):
    write_eagle3(tmp_path / "in")
    (tmp_path / "in" / name).unlink()
    with pytest.raises(ModelLoadError, match=name):
        import_draft(tmp_path / "in", model, tmp_path / "out", "inputs")


def test_a_format_that_cannot_say_what_a_head_does_is_refused(model, tmp_path):
    write_speculators(tmp_path / "in", 2, norm_output=True)
    import_draft(tmp_path / "in", model, tmp_path / "draft", "inputs")
    for kind in ("eagle1", "eagle3"):
        with pytest.raises(ConfigError):
            export_draft(tmp_path / "draft", model, tmp_path / "out", kind, 3)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(EyasError, match="not empty"):
        export_draft(tmp_path / "draft", model, tmp_path / "out", "speculators", 3)


def test_rotary_settings_of_the_target_are_never_inherited(tmp_path):
    folder = tmp_path / "target"
    rope = {"rope_type": "default", "rope_theta": 777.0}
    save_tiny_llama(folder, num_hidden_layers=NUM_LAYERS, rope_parameters=rope)
    assert ModelConfig.load(folder).rope_theta == 777.0
    scaling = {"rope_type": "linear", "factor": 4.0}
    write_eagle3(tmp_path / "in", rope_theta=123.0, rope_scaling=scaling)
    import_draft(tmp_path / "in", folder, tmp_path / "draft", "inputs")
    config = load_draft(tmp_path / "draft").config
    assert (config.rope_theta, config.rope_scaling.factor) == (123.0, 4.0)
    export_draft(tmp_path / "draft", folder, tmp_path / "out", "eagle3", 3)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["rope_theta"], written["rope_scaling"]) == (123.0, scaling)
