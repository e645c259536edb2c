"""The target equals transformers' Llama on the same folder, however its tokens are cut into passes."""

import pytest
import torch

from engine.attention.cpu import CpuAttention
from engine.attention.reference import ReferenceAttention
from engine.layers.linear import PackedLinear, can_pack
from engine.tree.library import TreeLibrary
from engine.weights.cache import cache_folder

transformers = pytest.importorskip("transformers")

from tests.layers.counted_ops import CountedOps  # noqa: E402
from tests.model.paged_model import CPU, LLAMA3_ROPE, PagedModel, save_tiny_llama  # noqa: E402

NUM_POSITIONS = 512
VARIANTS = {
    "plain": {},
    "untied": {"tie_word_embeddings": False},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "one_kv_head": {"num_key_value_heads": 1},
    "no_groups": {"num_key_value_heads": 6},
    "wide_heads": {"head_dim": 24},
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "llama_3_1": {
        "rope_parameters": LLAMA3_ROPE,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama_3_2": {"rope_parameters": LLAMA3_ROPE | {"factor": 32.0}, "num_key_value_heads": 3},
}
SCHEDULES = {
    "whole": [NUM_POSITIONS],
    "sevens": [7] * (NUM_POSITIONS // 7) + [NUM_POSITIONS % 7],
    "singles": [1] * NUM_POSITIONS,
}
# All three in one pass over the sequence: what a quick run of a real model can afford.
MIXED = [400, *[7] * 12, *[1] * 28]


def tokens_for(vocab_size):
    return torch.randint(0, vocab_size, (NUM_POSITIONS,), generator=torch.Generator().manual_seed(2))


@torch.inference_mode()
def logits_of(network, token_ids):
    return network(token_ids[None]).logits[0]


@pytest.fixture(scope="module")
def llama_3(tmp_path_factory):
    """Return by name the folder of a tiny Llama 3 and transformers' model of it."""
    found = {}
    for name in ("llama_3_1", "llama_3_2"):
        folder = tmp_path_factory.mktemp(name)
        found[name] = folder, save_tiny_llama(folder, **VARIANTS[name])
    return found


@pytest.fixture(scope="module")
def llama_3_1(llama_3):
    return llama_3["llama_3_1"]


@pytest.fixture(scope="module")
def smollm2():
    """Return the folder of the embedded model, tokens, and transformers' logits for them."""
    folder = cache_folder() / "smollm2"
    if not (folder / "config.json").is_file():
        pytest.skip("smollm2 is not in the cache: eyas pull smollm2")
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    token_ids = tokens_for(network.config.vocab_size)
    return folder, token_ids, logits_of(network, token_ids)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_on_every_kind_of_config(tmp_path, variant):
    network = save_tiny_llama(tmp_path, **VARIANTS[variant])
    model = PagedModel(tmp_path, CpuAttention(), num_positions=NUM_POSITIONS)
    token_ids = tokens_for(model.target.config.vocab_size)
    logits, _ = model.run_chunks(token_ids, MIXED)
    torch.testing.assert_close(logits, logits_of(network, token_ids), atol=1e-3, rtol=0)


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("variant", ["llama_3_1", "llama_3_2"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_logits_equal_transformers_in_any_chunks(llama_3, schedule, variant, is_packed):
    if is_packed and not can_pack(CPU, torch.float32):
        pytest.skip("this CPU has no packed kernels")
    folder, network = llama_3[variant]
    model = PagedModel(folder, CpuAttention(), num_positions=NUM_POSITIONS, is_packed=is_packed)
    assert isinstance(model.target.layers[0].qkv_proj, PackedLinear) == is_packed
    token_ids = tokens_for(model.target.config.vocab_size)
    logits, _ = model.run_chunks(token_ids, SCHEDULES[schedule])
    torch.testing.assert_close(logits, logits_of(network, token_ids), atol=1e-3, rtol=0)


@pytest.mark.parametrize("backend", [CpuAttention(), ReferenceAttention()], ids=lambda b: b.name)
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_logits_equal_transformers_in_pages_of_any_size(llama_3_1, backend, block_size):
    folder, network = llama_3_1
    model = PagedModel(folder, backend, num_positions=NUM_POSITIONS, block_size=block_size)
    token_ids = tokens_for(model.target.config.vocab_size)
    logits, _ = model.run_chunks(token_ids, MIXED)
    torch.testing.assert_close(logits, logits_of(network, token_ids), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(MIXED, id="mixed"),
        pytest.param([NUM_POSITIONS], id="whole", marks=pytest.mark.slow),
        pytest.param(SCHEDULES["sevens"], id="sevens", marks=pytest.mark.slow),
        pytest.param(SCHEDULES["singles"], id="singles", marks=pytest.mark.slow),
    ],
)
def test_logits_of_the_embedded_model_equal_transformers(smollm2, sizes):
    folder, token_ids, expected = smollm2
    model = PagedModel(folder, CpuAttention(), num_positions=NUM_POSITIONS)
    logits, _ = model.run_chunks(token_ids, sizes)
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("sizes", [[NUM_POSITIONS], MIXED], ids=["whole", "mixed"])
@pytest.mark.parametrize("taps", [(0,), (0, 1, 3), (2, 3), (3, 1)], ids=str)
def test_features_are_the_named_hidden_states_in_every_chunk(llama_3_1, taps, sizes):
    folder, network = llama_3_1
    model = PagedModel(folder, CpuAttention(), num_positions=NUM_POSITIONS, taps=taps)
    token_ids = tokens_for(model.target.config.vocab_size)
    _, features = model.run_chunks(token_ids, sizes)
    torch.testing.assert_close(features, _hidden_states(network, token_ids, taps), atol=1e-3, rtol=0)


@torch.inference_mode()
def _hidden_states(network, token_ids, taps):
    """Return [T, num_taps * H] of transformers; its last hidden state is normed, so layers are hooked."""
    after_layer = {}
    hooks = [
        layer.register_forward_hook(lambda _, __, out, idx=idx: after_layer.update({idx: out[0]}))
        for idx, layer in enumerate(network.model.layers)
    ]
    output = network(token_ids[None], output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    num_layers = len(after_layer)
    for idx in range(num_layers - 1):
        assert torch.equal(output.hidden_states[idx + 1][0], after_layer[idx])
    after_layer[num_layers] = output.hidden_states[-1][0]
    return torch.cat([after_layer[tap] for tap in taps], dim=-1)


def test_without_taps_there_are_no_features(llama_3_1):
    model = PagedModel(llama_3_1[0], CpuAttention(), num_positions=8)
    assert model.run(torch.arange(3), 0)[1].shape == (3, 0)


@pytest.mark.parametrize("tree", ["off", "chain-3", "tree-8", "tree-64"])
def test_every_path_of_a_tree_equals_the_same_tokens_in_line(llama_3_1, tree):
    folder, network = llama_3_1
    topology = TreeLibrary.search().get(tree)
    model = PagedModel(folder, CpuAttention(), num_positions=64)
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(0, 320, (37,), generator=generator)
    drafts = torch.randint(0, 320, (topology.num_nodes,), generator=generator)
    model.run(prompt, 0)
    logits = model.run_tree(drafts, topology, len(prompt))
    for node in range(topology.num_nodes):
        path = [i for i in range(node + 1) if topology.ancestor_bits[node] >> i & 1]
        expected = logits_of(network, torch.cat((prompt, drafts[path])))[-1]
        torch.testing.assert_close(logits[node], expected, atol=1e-3, rtol=0)


def test_it_runs_on_the_ops_it_is_told_to_use(tmp_path):
    save_tiny_llama(tmp_path)
    model = PagedModel(tmp_path, CpuAttention(), num_positions=32, taps=(1, 3))
    token_ids = torch.arange(9)
    expected = model.run(token_ids, 0)
    ops = CountedOps()
    model.target.use(ops)
    assert all(
        torch.equal(found, right) for found, right in zip(model.run(token_ids, 0), expected, strict=True)
    )
    assert ops.counts == {"embed": 1, "add_norm": 6, "silu_mul": 3}
