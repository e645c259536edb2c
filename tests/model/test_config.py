"""ModelConfig from config.json; the network itself is tested elsewhere."""

import json

import pytest

from engine.errors import ModelLoadError
from engine.model.config import ModelConfig, RopeScaling

LLAMA_32_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
WITHOUT = object()  # removes the key


def changed(**changes):
    return {key: value for key, value in (LLAMA_32_1B | changes).items() if value is not WITHOUT}


def test_every_field_is_read():
    assert ModelConfig.from_hf(LLAMA_32_1B) == ModelConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
        max_position=131072,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
        dtype="bfloat16",
    )


def test_fused_projection_sizes_follow_from_heads():
    config = ModelConfig.from_hf(LLAMA_32_1B)
    assert (config.query_size, config.kv_size) == (2048, 512)


def test_rope_parameters_of_transformers_5_mean_the_same():
    newer = changed(
        rope_theta=WITHOUT,
        rope_scaling=WITHOUT,
        torch_dtype=WITHOUT,
        dtype="bfloat16",
        rope_parameters=LLAMA_32_1B["rope_scaling"] | {"rope_theta": 500000.0},
    )
    assert ModelConfig.from_hf(newer) == ModelConfig.from_hf(LLAMA_32_1B)


@pytest.mark.parametrize(
    "scaling", [None, {"rope_type": "default"}, {"type": "default", "rope_theta": 500000}]
)
def test_unscaled_rope_has_no_scaling(scaling):
    config = ModelConfig.from_hf(changed(rope_scaling=scaling))
    assert (config.rope_theta, config.rope_scaling) == (500000.0, None)


def test_linear_rope_accepts_the_old_key_type():
    config = ModelConfig.from_hf(changed(rope_scaling={"type": "linear", "factor": 4}))
    assert config.rope_scaling == RopeScaling("linear", 4.0, 1.0, 1.0, 131072)


def test_absent_keys_take_the_defaults_of_llama():
    names = ("num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "max_position_embeddings")
    names += ("rms_norm_eps", "tie_word_embeddings", "bos_token_id", "eos_token_id", "torch_dtype")
    config = ModelConfig.from_hf(changed(**dict.fromkeys(names, WITHOUT)))
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (32, 64, 10000.0)
    assert (config.max_position, config.rms_norm_eps, config.tie_word_embeddings) == (2048, 1e-6, False)
    assert (config.bos_token_id, config.eos_token_ids, config.dtype) == (None, (), "float32")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
        ({"architectures": WITHOUT}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_type"),
        ({"rope_scaling": "llama3"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": LLAMA_32_1B["rope_scaling"] | {"low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": True}, "rms_norm_eps"),
        ({"hidden_size": WITHOUT}, "hidden_size"),
        ({"hidden_size": "2048"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 2050, "head_dim": WITHOUT}, "num_attention_heads"),
        ({"num_attention_heads": 0, "head_dim": WITHOUT}, "num_attention_heads"),
        ({"num_key_value_heads": 5}, "num_kv_heads"),
        ({"num_hidden_layers": 0}, "num_layers"),
        ({"head_dim": 63}, "head_dim"),
        ({"vocab_size": 128000}, "vocab_size"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [2, None]}, "eos_token_id"),
        ({"bos_token_id": -1}, "special token"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(changes, named):
    with pytest.raises(ModelLoadError, match=named):
        ModelConfig.from_hf(changed(**changes))


def test_generation_config_adds_end_of_text_ids(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(changed(eos_token_id=128001)))
    assert ModelConfig.load(tmp_path).eos_token_ids == (128001,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [128001, 128009]}))
    assert ModelConfig.load(tmp_path).eos_token_ids == (128001, 128009)


@pytest.mark.parametrize("text", [None, "", "{", "[]", "null", "[" * 100_000])
def test_an_unreadable_config_names_its_file(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        ModelConfig.load(tmp_path)


@pytest.mark.parametrize("rope_scaling", [None, LLAMA_32_1B["rope_scaling"]])
def test_a_config_saved_by_transformers_is_read_back(tmp_path, rope_scaling):
    transformers = pytest.importorskip("transformers")
    raw = changed(rope_scaling=rope_scaling)
    transformers.LlamaConfig(**raw).save_pretrained(tmp_path)
    assert ModelConfig.load(tmp_path) == ModelConfig.from_hf(raw)
