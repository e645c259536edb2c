"""The Triton backend: tree attention in one launch and a merge, for CUDA graphs.

The arithmetic is left to `engine/kernels`; this module holds what the layers of one pass share.
"""

import torch
from torch import Tensor

from engine.attention.backend import AttendChunks, AttendPages, AttentionLayout, PrefillLayout
from engine.kernels.prefill_attention import attend_prefill, choose_prefill_config
from engine.kernels.tree_attention import attend_tree
from engine.kernels.tree_attention_config import TreeConfig, TreeShape, choose_config
from engine.kernels.tree_attention_plan import TreePlan, make_plan


class TritonAttention:
    """Serves page sizes and head dims that are powers of two, 16 to 256 and 16 to 128."""

    name = "triton"
    is_capturable = True
    is_prefill_capturable = True

    def bind(self, layout: AttentionLayout, block_size: int) -> AttendPages:
        tables, starts, ends = layout.block_tables, layout.prefix_start, layout.prefix_end
        num_processors = processor_count(tables.device)
        overlap = can_overlap(tables.device)
        # The plan is made once per pass: every layer of a network asks for the same.
        plans: dict[TreeConfig, TreePlan] = {}

        def attend(q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
            limit = tables.shape[1] * block_size
            shape = TreeShape.of(q, k, limit)
            config = choose_config(shape, num_processors)
            if config not in plans:
                plans[config] = make_plan(starts, ends, layout.suffix_mask, config=config, limit=limit)
            tensors = (q, k, v, k_pages, v_pages, tables, starts, ends)
            return attend_tree(*tensors, config=config, plan=plans[config], overlap=overlap)

        return attend

    def bind_prefill(self, layout: PrefillLayout, block_size: int) -> AttendChunks:
        def attend(q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
            assert k_pages.shape[1] == block_size, (k_pages.shape, block_size)
            group_size = q.shape[1] // k_pages.shape[2]
            num_chunks = layout.starts.shape[0]
            config = choose_prefill_config(q.shape[0], num_chunks, group_size, k_pages.dtype.itemsize)
            where = (layout.block_tables, layout.cu_seqlens, layout.starts, layout.window_starts)
            return attend_prefill(q, k_pages, v_pages, *where, config=config)

        return attend


def processor_count(device: torch.device) -> int:
    """Return the number of multiprocessors; a CPU, which interprets kernels in tests, counts as four."""
    if device.type == "cpu":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def can_overlap(device: torch.device) -> bool:
    """Return whether kernels can start before the one before ends (compute capability 9 and up)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
