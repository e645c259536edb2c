"""The CPU backend: prefix pages and suffix side by side through torch's fused CPU attention kernel.

One masked pass replaces the reference's two and their merge, since at a few queries the calls cost more than
the sums.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.backend import AttendChunks, AttendPages, AttentionLayout, PrefillLayout
from engine.attention.chunks import bind_chunks


class CpuAttention:
    """Single-pass attention; the queries of a K/V head are packed as rows, so K/V is never expanded."""

    name = "cpu"
    is_capturable = False
    is_prefill_capturable = False

    def bind_prefill(self, layout: PrefillLayout, block_size: int) -> AttendChunks:
        return bind_chunks(self, layout, block_size)

    def bind(self, layout: AttentionLayout, block_size: int) -> AttendPages:
        num_rows, num_blocks = layout.block_tables.shape
        position = torch.arange(num_blocks * block_size)
        prefix_mask = (position >= layout.prefix_start[..., None]) & (position < layout.prefix_end[..., None])
        mask = torch.cat((prefix_mask, layout.suffix_mask), dim=-1)
        pages = layout.block_tables.flatten()
        # Each (dtype, group) is made once per pass: every layer of a network asks for the same.
        biases: dict[tuple[torch.dtype, int], Tensor] = {}

        def bias(dtype: torch.dtype, group: int) -> Tensor:
            if (dtype, group) not in biases:
                # Finite, and half the range: a block of the kernel that is wholly masked must not make -inf -
                # -inf.
                hidden = torch.finfo(dtype).min / 2
                rows = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, hidden)
                biases[dtype, group] = rows.repeat_interleave(group, dim=1).unsqueeze(1)
            return biases[dtype, group]

        def attend(q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
            num_nodes, num_heads, head_dim = q.shape[1:]
            num_kv_heads = k.shape[2]
            group = num_heads // num_kv_heads
            window = (num_rows, num_blocks * block_size, num_kv_heads, head_dim)
            keys = torch.cat((k_pages.index_select(0, pages).view(window), k), dim=1)
            values = torch.cat((v_pages.index_select(0, pages).view(window), v), dim=1)
            packed = q.view(num_rows, num_nodes, num_kv_heads, group, head_dim).transpose(1, 2)
            out = F.scaled_dot_product_attention(
                packed.reshape(num_rows, num_kv_heads, num_nodes * group, head_dim),
                keys.transpose(1, 2),
                values.transpose(1, 2),
                attn_mask=bias(q.dtype, group),
            )
            unpacked: Tensor = out.view(num_rows, num_kv_heads, num_nodes, group, head_dim).transpose(1, 2)
            return unpacked.reshape(num_rows, num_nodes, num_heads, head_dim)

        return attend
