"""How many blocks fit: the bytes planned are the bytes allocated, and the budget is used and kept."""

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kvcache.kv_pool import KVPool
from engine.model.config import ModelConfig
from engine.runner.memory import bytes_per_block, plan_num_blocks
from tests.draft.tiny_head import make_draft_config
from tests.model.paged_model import CPU, TINY

MODEL = ModelConfig.from_hf(TINY | {"architectures": ["LlamaForCausalLM"]})
GIB = 1 << 30

with_and_without_draft = pytest.mark.parametrize("draft", [None, make_draft_config()], ids=["plain", "draft"])


def plan(draft=None, dtype=torch.float32, **changes):
    return plan_num_blocks(EngineConfig(model=Path("unread"), **changes), MODEL, draft, dtype, CPU)


@with_and_without_draft
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [1, 16])
def test_a_block_counts_what_the_pools_of_both_networks_allocate(draft, dtype, block_size):
    pools = [KVPool(network.num_layers, 3, block_size, network.num_kv_heads, network.head_dim, dtype, CPU)
             for network in (MODEL, draft) if network is not None]  # fmt: skip
    allocated = sum(pool.k.nbytes + pool.v.nbytes for pool in pools)
    assert 3 * bytes_per_block(block_size, MODEL, draft, dtype) == allocated


@with_and_without_draft
@pytest.mark.parametrize("memory_gib", [0.001, 0.0371, 2.0])
def test_as_many_blocks_as_the_budget_holds(draft, memory_gib):
    num_blocks = plan(draft, memory_gib=memory_gib)
    per_block = bytes_per_block(16, MODEL, draft, torch.float32)
    assert num_blocks * per_block <= memory_gib * GIB < (num_blocks + 1) * per_block


def test_blocks_asked_for_are_given_beside_the_dummy_whatever_the_budget():
    assert plan(num_blocks=7, memory_gib=1e-9) == 8


def test_a_budget_below_two_blocks_is_refused():
    per_block = bytes_per_block(16, MODEL, None, torch.float32)
    assert plan(memory_gib=2 * per_block / GIB) == 2
    with pytest.raises(ConfigError, match="raise memory_gib"):
        plan(memory_gib=(2 * per_block - 1) / GIB)


def test_cuda_takes_most_of_what_the_weights_left_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 80 * GIB))
    config = EngineConfig(model=Path("unread"), memory_gib=0.001)
    num_blocks = plan_num_blocks(config, MODEL, None, torch.bfloat16, torch.device("cuda"))
    num_bytes = num_blocks * bytes_per_block(64, MODEL, None, torch.bfloat16)
    assert 8 * GIB < num_bytes < 9 * GIB


def test_cuda_leaves_room_for_the_widest_step_of_all_rows(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 80 * GIB))

    def num_bytes(num_rows, draft):
        config = EngineConfig(model=Path("unread"), max_num_seqs=num_rows)
        num_blocks = plan_num_blocks(config, MODEL, draft, torch.bfloat16, torch.device("cuda"))
        return num_blocks * bytes_per_block(64, MODEL, draft, torch.bfloat16)

    draft, slack = make_draft_config(), 1 << 20
    num_rows = int(0.2 * GIB) // (3 * 64 * MODEL.vocab_size * 4)  # copies, nodes, tokens, bytes
    assert 0.8 * GIB - slack < num_bytes(num_rows, draft) <= 0.8 * GIB + slack
    assert 0.85 * GIB - slack < num_bytes(num_rows, None) <= 0.85 * GIB, "without a draft a row has one node"
    # More than there is: most is kept for the cache.
    assert 0.7 * GIB - slack < num_bytes(1 << 20, draft) <= 0.7 * GIB


def test_a_device_without_memory_for_two_blocks_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 80 * GIB))
    with pytest.raises(ConfigError, match="use a device with more memory"):
        plan_num_blocks(EngineConfig(model=Path("unread")), MODEL, None, torch.bfloat16, torch.device("cuda"))
