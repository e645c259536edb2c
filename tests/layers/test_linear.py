"""Packed linear layers answer as plain ones do, and replace them wherever a network holds one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine.draft.head import DraftHead
from engine.layers.linear import PackedLinear, can_pack, pack_linears
from engine.layers.rotary import rotate_qkv
from engine.model.config import ModelConfig
from engine.runner.worker import load_target
from tests.draft.tiny_head import make_draft_config
from tests.model.paged_model import CPU, TINY, save_tiny_llama

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
NUM_KV_HEADS = TINY["num_key_value_heads"]
PACKABLE = [dtype for dtype in TOLERANCE if can_pack(CPU, dtype)]


def alone(layer_idx, qkv, angles):
    """Attend to nothing but the token itself: its answer is its own value."""
    v = rotate_qkv(qkv, angles, NUM_KV_HEADS)[2]
    return v.repeat_interleave(qkv.shape[1] // NUM_KV_HEADS - 2, dim=1)


@pytest.mark.parametrize("dtype", PACKABLE, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (7,), (64,), (2, 5), (200,)], ids=str)
def test_a_packed_layer_equals_the_plain_one(dtype, has_bias, shape):
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(s, generator=generator) for s in ((48, 33), (48,), (*shape, 33)))
    expected = F.linear(x.to(dtype).double(), weight.to(dtype).double(), bias.double() if has_bias else None)
    layer = PackedLinear(weight.to(dtype), bias.to(dtype) if has_bias else None)
    found = layer(x.to(dtype))
    assert found.dtype == dtype
    tolerance = TOLERANCE[dtype] * 33**0.5
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


def test_packing_replaces_every_linear_layer_at_any_depth():
    network = nn.Sequential(nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 2), nn.LayerNorm(4)]))
    pack_linears(network)
    kinds = [type(module) for module in network.modules()]
    assert nn.Linear not in kinds
    assert kinds.count(PackedLinear) == 2
    assert list(network.state_dict()) == ["1.1.weight", "1.1.bias"]


@pytest.mark.parametrize("dtype", PACKABLE, ids=str)
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_packed_target_keeps_its_logits_and_its_readable_head(tmp_path, dtype, is_tied):
    save_tiny_llama(tmp_path, tie_word_embeddings=is_tied, mlp_bias=True, attention_bias=True)
    target = load_target(tmp_path, ModelConfig.load(tmp_path), (), 16, dtype, CPU)
    token_ids, positions, head = torch.arange(9), torch.arange(9), target.head_weight.clone()
    with torch.inference_mode():
        expected = target.logits(target(token_ids, positions, alone).hidden)
        target.pack()
        found = target.logits(target(token_ids, positions, alone).hidden)
    scale = expected.float().abs().amax().item()
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype] * scale * 4, rtol=0)
    assert torch.equal(target.head_weight, head)


@pytest.mark.parametrize("dtype", PACKABLE, ids=str)
def test_a_packed_draft_keeps_its_logits(dtype):
    torch.manual_seed(0)
    head = DraftHead(make_draft_config(), num_positions=16, dtype=dtype)
    embedding = torch.randn(TINY["vocab_size"], TINY["hidden_size"]).to(dtype)
    head.requires_grad_(False).bind(embedding, embedding)
    features = torch.randn(5, head.config.feature_size).to(dtype)

    def logits():
        _, hidden = head(torch.arange(5), head.fuse(features), torch.arange(5), alone)
        return head.logits(hidden)

    expected = logits()
    head.pack()
    scale = expected.float().abs().amax().item()
    torch.testing.assert_close(logits(), expected, atol=TOLERANCE[dtype] * scale * 4, rtol=0)


def test_only_a_cpu_packs():
    assert not can_pack(torch.device("cuda"), torch.float32)
