"""Tiny Llama folders written by transformers, and a target driven through paged K/V as the runner drives it.

What is right is left to the tests.
"""

import torch
import transformers

from engine.attention.backend import AttentionLayout
from engine.kvcache.kv_pool import KVPool, slots_of
from engine.layers.linear import can_pack
from engine.layers.rotary import rotate_qkv
from engine.model.config import ModelConfig
from engine.runner.worker import load_target

CPU = torch.device("cpu")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
TINY = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Ten times the usual: attention and logits that are far from flat.
    "initializer_range": 0.2,
}


def save_tiny_llama(folder, **changes):
    """Save a random Llama, biases and norms drawn too, in float32; return transformers' own model of it."""
    torch.manual_seed(0)
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(TINY | changes)))
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    network.save_pretrained(folder)
    return network.eval()


class PagedModel:
    """One sequence in pages that lie in no order among those of others, which are full of garbage.

    Its weights are packed as an engine's are where this CPU can, unless `is_packed` is False.
    """

    def __init__(
        self,
        folder,
        backend,
        *,
        num_positions,
        taps=(),
        block_size=16,
        dtype=torch.float32,
        is_packed=True,
    ):
        config = ModelConfig.load(folder)
        self.target = load_target(folder, config, taps, num_positions, dtype, CPU)
        if is_packed and can_pack(CPU, dtype):
            self.target.pack()
        self.backend, self.block_size = backend, block_size
        num_blocks = -(-num_positions // block_size)
        shape = (config.num_layers, 2 * num_blocks + 1, block_size, config.num_kv_heads, config.head_dim)
        self.pool = KVPool(*shape, dtype, CPU)
        generator = torch.Generator().manual_seed(1)
        self.pool.k.normal_(std=30.0, generator=generator)
        self.pool.v.normal_(std=30.0, generator=generator)
        self.table = 1 + torch.randperm(2 * num_blocks, generator=generator)[None, :num_blocks]

    def run(self, token_ids, start):
        """Run tokens [T] at positions from `start`; return (logits [T, V], features [T, F]) and cache
        them.
        """
        positions = torch.arange(start, start + len(token_ids))
        mask = torch.ones(len(token_ids), len(token_ids), dtype=torch.bool).tril()
        slots = slots_of(self.table, positions[None], torch.ones(1, 1, dtype=torch.bool), self.block_size)
        return self._forward(token_ids, positions, start, mask, slots.flatten())

    def run_tree(self, token_ids, topology, root_position):
        """Run the nodes [N] of a tree whose root is at `root_position`; return logits [N, V], cache
        nothing.
        """
        depths = torch.tensor(topology.depths)
        bits = torch.tensor([[b >> node & 1 for node in range(len(depths))] for b in topology.ancestor_bits])
        return self._forward(token_ids, root_position + depths, root_position, bits.bool(), None)[0]

    @torch.inference_mode()
    def _forward(self, token_ids, positions, prefix_len, suffix_mask, slots):
        window = torch.zeros(1, len(token_ids), dtype=torch.int64)
        table = self.table[:, : -(-prefix_len // self.block_size)]
        layout = AttentionLayout(table, window, window + prefix_len, suffix_mask[None])
        attend_pages = self.backend.bind(layout, self.block_size)

        def attend(layer_idx, qkv, angles):
            q, k, v = rotate_qkv(qkv, angles, self.pool.num_kv_heads)
            if slots is not None:
                for rows, stored in zip(self.pool.rows(layer_idx), (k, v), strict=True):
                    rows[slots] = stored
            pages = self.pool.k[layer_idx], self.pool.v[layer_idx]
            return attend_pages(q[None], k[None], v[None], *pages)[0]

        output = self.target(token_ids, positions, attend)
        return self.target.logits(output.hidden), output.features

    def run_chunks(self, token_ids, sizes):
        """Run tokens [T] in chunks of `sizes`, which sum to T; return (logits [T, V], features [T, F])."""
        assert sum(sizes) == len(token_ids), (sum(sizes), len(token_ids))
        chunks, start = [], 0
        for size in sizes:
            chunks.append(self.run(token_ids[start : start + size], start))
            start += size
        return torch.cat([logits for logits, _ in chunks]), torch.cat([features for _, features in chunks])
