"""The mapping of Llama checkpoints onto fused projections, against the names that transformers saves."""

import pytest
import torch

from engine.model.config import ModelConfig
from engine.weights.loader import load_into
from engine.weights.mapping import Placement, identity_mapping, llama_mapping
from engine.weights.safetensors import SafetensorsFile, write_safetensors

transformers = pytest.importorskip("transformers")

HIDDEN, MLP, VOCAB, QUERY, KV = 32, 48, 64, 64, 32  # head_dim 16: hidden != heads * head_dim


def make_checkpoint(path, is_tied, has_bias):
    """Save a random tiny Llama; return its config and its state."""
    torch.manual_seed(5)
    hf_config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=is_tied,
        attention_bias=has_bias,
        mlp_bias=has_bias,
    )
    model = transformers.LlamaForCausalLM(hf_config)
    state = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    if is_tied:
        del state["lm_head.weight"]
    write_safetensors(path, state)
    return ModelConfig.from_hf(hf_config.to_dict()), state


def our_shapes(is_tied, has_bias):
    shapes = {"embed_tokens.weight": (VOCAB, HIDDEN), "norm.weight": (HIDDEN,)}
    if not is_tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer_idx in range(2):
        prefix = f"layers.{layer_idx}"
        shapes |= {f"{prefix}.{name}.weight": (HIDDEN,) for name in ("input_norm", "post_attention_norm")}
        for name, rows, columns in (
            ("qkv_proj", QUERY + 2 * KV, HIDDEN),
            ("o_proj", HIDDEN, QUERY),
            ("gate_up_proj", 2 * MLP, HIDDEN),
            ("down_proj", HIDDEN, MLP),
        ):
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
    return shapes


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_transformers_checkpoint_fills_the_fused_module(tmp_path, named_module, is_tied, has_bias):
    config, state = make_checkpoint(tmp_path / "m.safetensors", is_tied, has_bias)
    module = named_module(our_shapes(is_tied, has_bias))
    mapping = llama_mapping(
        num_layers=config.num_layers,
        query_size=config.query_size,
        kv_size=config.kv_size,
        intermediate_size=config.intermediate_size,
        tie_word_embeddings=config.tie_word_embeddings,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )
    assert mapping.placements.keys() == state.keys()
    load_into(module, SafetensorsFile(tmp_path / "m.safetensors"), mapping)
    ours = module.state_dict()
    for kind in ("weight", "bias") if has_bias else ("weight",):
        stored, prefix = "model.layers.1", "layers.1"
        qkv = torch.cat([state[f"{stored}.self_attn.{part}_proj.{kind}"] for part in "qkv"])
        gate_up = torch.cat([state[f"{stored}.mlp.{part}_proj.{kind}"] for part in ("gate", "up")])
        assert torch.equal(ours[f"{prefix}.qkv_proj.{kind}"], qkv)
        assert torch.equal(ours[f"{prefix}.gate_up_proj.{kind}"], gate_up)
        assert torch.equal(ours[f"{prefix}.o_proj.{kind}"], state[f"{stored}.self_attn.o_proj.{kind}"])
        assert torch.equal(ours[f"{prefix}.down_proj.{kind}"], state[f"{stored}.mlp.down_proj.{kind}"])
    assert torch.equal(ours["layers.0.input_norm.weight"], state["model.layers.0.input_layernorm.weight"])
    assert torch.equal(
        ours["layers.0.post_attention_norm.weight"], state["model.layers.0.post_attention_layernorm.weight"]
    )
    assert torch.equal(ours["embed_tokens.weight"], state["model.embed_tokens.weight"])
    assert torch.equal(ours["norm.weight"], state["model.norm.weight"])
    if not is_tied:
        assert torch.equal(ours["lm_head.weight"], state["lm_head.weight"])


def test_identity_maps_each_name_to_itself():
    assert identity_mapping(["x", "y.z"]).placements == {"x": Placement("x"), "y.z": Placement("y.z")}
