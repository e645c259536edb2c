"""Synthetic networks have the shapes and counts that were published, and the weights that are promised."""

import pytest
import torch

from engine.errors import ConfigError
from engine.kvcache.kv_pool import KVPool
from engine.layers.rotary import Rotary
from engine.runner import synthetic
from engine.runner.synthetic import (
    eagle3_config,
    fill_pages,
    head_sizes,
    random_head,
    random_target,
    shape_of,
    target_sizes,
)
from tests.synthetic_cases import TINY

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def networks():
    draft = eagle3_config(TINY)
    target = random_target(TINY, draft.taps, 64, torch.float32, CPU)
    return target, random_head(draft, target, 64)


@pytest.mark.parametrize(
    ("name", "num_kept", "kv_bytes"),
    [
        ("llama-3.1-8b", 8_030_261_248, 131072),
        ("llama-3.3-70b", 70_553_706_496, 327680),
        ("smollm2-135m", 134_515_008, 23040),
    ],
)
def test_published_models_have_their_published_size(name, num_kept, kv_bytes):
    sizes, model = target_sizes(shape_of(name), 2), shape_of(name)
    assert (sizes.num_kept, sizes.kv_bytes) == (num_kept, kv_bytes)
    embedding = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    assert sizes.num_kept - sizes.num_matrix == embedding


def test_a_model_that_is_not_known_is_refused():
    with pytest.raises(ConfigError, match=r"llama-3\.1-8b.*'gpt'"):
        shape_of("gpt")


def test_the_draft_head_is_one_layer_over_three_taps_and_32000_tokens():
    config = eagle3_config(shape_of("llama-3.1-8b"))
    assert (config.num_layers, config.draft_vocab_size, config.taps) == (1, 32000, (2, 16, 29))
    assert config.feature_size == 3 * 4096
    h, inner = 4096, 14336
    expected = 3 * h * h + 2 * h * (4096 + 2048) + h * h + 3 * h * inner + 32000 * h + 4 * h
    assert head_sizes(config, 2).num_matrix == expected


def test_weights_are_normal_and_norms_one(networks):
    for network in networks:
        for name, parameter in network.named_parameters():
            if "norm" in name:
                assert (parameter == 1).all()
                continue
            assert float(parameter.std()) == pytest.approx(synthetic.WEIGHT_STD, rel=0.1)
            assert abs(float(parameter.mean())) < 0.002
            assert not parameter.requires_grad
    assert not torch.equal(networks[0].layers[0].o_proj.weight, networks[0].layers[1].o_proj.weight)


def test_the_head_is_bound_to_its_target_and_drafts_ids_once_each(networks):
    target, head = networks
    assert head.embed_rows.data_ptr() == target.embed_tokens.weight.data_ptr()
    assert torch.equal(head.head_rows, target.lm_head.weight[head.target_ids])
    assert head.target_ids.unique().numel() == head.target_ids.numel() == head.config.draft_vocab_size


def test_a_draft_of_fewer_tokens_spreads_them_over_the_target_s(networks, monkeypatch):
    monkeypatch.setattr(synthetic, "DRAFT_VOCAB_SIZE", 100)
    ids = random_head(eagle3_config(TINY), networks[0], 64).target_ids
    assert ids.unique().numel() == 100
    assert (int(ids.min()), int(ids.max())) == (0, 316)


def test_rotary_tables_are_computed_not_random(networks):
    expected = Rotary(TINY.head_dim, TINY.rope_theta, TINY.rope_scaling, 64, torch.float32)
    for network in networks:
        for table, values in zip(network.rotary.buffers(), expected.buffers(), strict=True):
            assert torch.equal(table, values)


def test_pages_are_filled_with_standard_normal_numbers():
    pool = KVPool(2, 50, 8, 2, 16, torch.float32, CPU)
    fill_pages(pool, seed=3)
    for pages in (pool.k, pool.v):
        assert float(pages.std()) == pytest.approx(1.0, abs=0.05)
        assert abs(float(pages.mean())) < 0.05
    assert not torch.equal(pool.k, pool.v)
    assert not torch.equal(pool.k[0], pool.k[1])
