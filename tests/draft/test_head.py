"""The draft network equals its formula, and shares rather than stores what belongs to the target."""

import pytest
import torch

from engine.draft.head import DraftHead
from engine.layers.rotary import inverse_frequencies, rotate_qkv
from tests.draft.tiny_head import make_draft_config
from tests.layers.counted_ops import CountedOps
from tests.layers.plain import attend_causally, plain_layer, plain_norm

HIDDEN, VOCAB = 48, 320


def make_head(**changes):
    """Return a head with random weights, norms too, bound to a random target: (head, embedding, output)."""
    torch.manual_seed(0)
    head = DraftHead(make_draft_config(**changes), num_positions=64, dtype=torch.float32)
    for parameter in head.requires_grad_(False).parameters():
        parameter.normal_(std=0.3)
    head.target_ids.copy_(torch.randperm(VOCAB)[: head.config.draft_vocab_size])
    embedding, output = torch.randn(2, VOCAB, HIDDEN)
    head.bind(embedding, output)
    return head, embedding, output


@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("is_feedback_normed", [False, True])
def test_it_equals_the_formula(num_layers, is_feedback_normed):
    head, embedding, output = make_head(num_layers=num_layers, is_feedback_normed=is_feedback_normed)
    config = head.config
    token_ids, positions = torch.randint(0, VOCAB, (7,)), torch.arange(20, 27)
    features = torch.randn(7, config.feature_size)
    feature, hidden = head(token_ids, head.fuse(features), positions, attend_causally(config.num_kv_heads))

    frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    residual = features.double() @ head.fc.weight.double().T
    first = plain_norm(head.layers[0].input_norm, embedding[token_ids])
    x = torch.cat((first, plain_norm(head.feature_norm, residual)), -1)
    for layer in head.layers:
        x = x if layer is head.layers[0] else plain_norm(layer.input_norm, residual)
        residual = plain_layer(layer, x, residual, positions, frequencies)
    expected = plain_norm(head.norm, residual)
    torch.testing.assert_close(hidden.double(), expected, atol=1e-4, rtol=1e-3)
    expected_feature = expected if is_feedback_normed else residual
    torch.testing.assert_close(feature.double(), expected_feature, atol=1e-4, rtol=1e-3)
    logits = expected @ output[head.target_ids].double().T
    torch.testing.assert_close(head.logits(hidden).double(), logits, atol=1e-3, rtol=1e-3)


def test_the_embedding_is_shared_and_the_drafted_rows_follow_the_vocabulary_map():
    head, embedding, output = make_head()
    assert head.embed_rows.data_ptr() == embedding.data_ptr()
    assert torch.equal(head.head_rows, output[head.target_ids])


def test_only_its_own_weights_and_vocabulary_are_saved():
    head = make_head()[0]
    assert {name.split(".")[0] for name in head.state_dict()} == {
        "fc",
        "feature_norm",
        "layers",
        "norm",
        "target_ids",
    }


def test_it_runs_on_the_ops_it_is_told_to_use():
    head = make_head()[0]
    inputs = torch.arange(4), torch.randn(4, HIDDEN), torch.arange(4), attend_causally(2)
    expected = head(*inputs)
    ops = CountedOps()
    head.use(ops)
    assert all(torch.equal(found, right) for found, right in zip(head(*inputs), expected, strict=True))
    assert ops.counts == {"norm": 2, "add_norm": 4, "silu_mul": 2}


def test_what_the_target_owns_gets_no_gradient():
    head = DraftHead(make_draft_config(), num_positions=8, dtype=torch.float32)
    rows = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    head.bind(rows, rows)
    token_ids, positions = torch.arange(3), torch.arange(3)
    features = head.fuse(torch.randn(3, head.config.feature_size))

    def attend(layer_idx, qkv, angles):
        q, k, v = rotate_qkv(qkv, angles, head.config.num_kv_heads)
        return q + (k + v).repeat_interleave(2, 1)

    head.logits(head(token_ids, features, positions, attend)[1]).sum().backward()
    assert rows.grad is None
    assert all(parameter.grad is not None for parameter in head.parameters())
