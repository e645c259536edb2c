"""The xformers backend: split-K attention over pages, biased attention over the suffix, and their merge.

The arithmetic is left to xformers 0.0.35, whose operators are named here: left to choose, it raises on CUDA.
"""

import torch
from torch import Tensor
from xformers import _cpp_lib
from xformers.ops import fmha
from xformers.ops.fmha import triton_splitk
from xformers.ops.fmha.attn_bias import PagedBlockDiagonalGappyKeysMask, _GappySeqInfo, _SeqLenInfo

from engine.attention.backend import AttendChunks, AttendPages, AttentionLayout, PrefillLayout
from engine.attention.chunks import bind_chunks
from engine.errors import ConfigError

# A page is read in tiles of 64 keys, which may not cross its end.
_TILE = 64
_DTYPES = (torch.float16, torch.bfloat16)
_OP = triton_splitk.FwOp


class XformersAttention:
    """Serves pages of a multiple of 64 positions in float16 or bfloat16, on CUDA only.

    A window of its own makes a node a row of its own: windows that a row's nodes share by stride are faster.
    """

    name = "xformers"
    is_capturable = True
    is_prefill_capturable = False

    def __init__(self) -> None:
        # Without its compiled library, xformers imports all the same and refuses the first step; it has no
        # public name for that.
        if not _cpp_lib._built_with_cuda:  # noqa: SLF001
            reason = _cpp_lib._cpp_library_load_exception or "it was built for the CPU"  # noqa: SLF001
            raise ConfigError(f"attention_backend xformers cannot run on CUDA here: {reason}")

    def bind(self, layout: AttentionLayout, block_size: int) -> AttendPages:
        if block_size % _TILE:
            raise ConfigError(
                f"attention_backend xformers needs a block_size of a multiple of {_TILE}, found {block_size}"
            )
        if layout.block_tables.device.type != "cuda":
            raise ConfigError("attention_backend xformers runs on CUDA only: use auto")
        prefix = _prefix_bias(layout, block_size) if layout.block_tables.shape[1] else None
        hidden = ~layout.suffix_mask[:, None, None]

        def attend(q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
            _refuse_dtype(q, k_pages)
            num_rows, num_nodes, num_heads, head_dim = q.shape
            num_kv_heads = k.shape[2]
            group = num_heads // num_kv_heads
            grouped = q.reshape(num_rows, num_nodes, num_kv_heads, group, head_dim)
            bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device)
            bias.masked_fill_(hidden, -torch.inf)
            parts = [
                fmha.memory_efficient_attention_forward_requires_grad(
                    grouped,
                    *(_expand(x, group) for x in (k, v)),
                    attn_bias=bias.expand(-1, num_kv_heads, group, -1, -1),
                    op=_OP,
                )
            ]
            if prefix is not None:
                out, lse = fmha.memory_efficient_attention_partial(
                    grouped.reshape(1, -1, num_kv_heads, group, head_dim),
                    *(_expand(x.flatten(0, 1)[None], group) for x in (k_pages, v_pages)),
                    attn_bias=prefix,
                    op=_OP,
                )
                lse = lse.view(num_kv_heads, group, num_rows, num_nodes).permute(2, 0, 1, 3)
                parts.append((out.view(grouped.shape), lse))
            outs, lses = zip(*parts, strict=True)
            merged: Tensor = fmha.merge_attentions(outs, lses, write_lse=False, output_dtype=q.dtype)[0]
            return merged.reshape(q.shape)

        return attend

    def bind_prefill(self, layout: PrefillLayout, block_size: int) -> AttendChunks:
        return bind_chunks(self, layout, block_size)


def _refuse_dtype(q: Tensor, pages: Tensor) -> None:
    if q.dtype not in _DTYPES or pages.dtype != q.dtype:
        raise ConfigError(
            "attention_backend xformers computes in float16 or bfloat16 over pages of the same dtype, found "
            f"{q.dtype} over {pages.dtype}"
        )


def _expand(x: Tensor, group: int) -> Tensor:
    """Return K or V [B, S, Hkv, D] as [B, S, Hkv, group, D] without a copy."""
    return x.unsqueeze(3).expand(-1, -1, -1, group, -1)


def _prefix_bias(layout: AttentionLayout, block_size: int) -> PagedBlockDiagonalGappyKeysMask:
    """Return the windows of `layout` as xformers wants them: lengths on the device, their bounds on the host.

    It is built field by field, since the constructors take lengths from the host only.
    """
    tables, starts, ends = layout.block_tables.int(), layout.prefix_start, layout.prefix_end
    num_rows, num_nodes = starts.shape
    if starts.stride(1) == 0 and ends.stride(1) == 0:
        starts, ends = starts[:, 0], ends[:, 0]
    else:
        tables = tables.repeat_interleave(num_nodes, 0)
        starts, ends = starts.flatten(), ends.flatten()
        num_rows, num_nodes = num_rows * num_nodes, 1
    limit = tables.shape[1] * block_size
    is_read = starts < ends
    firsts = torch.zeros(num_rows + 1, dtype=torch.int32, device=tables.device)
    firsts[:-1] = torch.where(is_read, starts, 0)
    offsets = list(range(0, (num_rows + 1) * num_nodes, num_nodes))
    queries = _SeqLenInfo(
        seqstart=torch.arange(0, offsets[-1] + 1, num_nodes, dtype=torch.int32, device=tables.device),
        max_seqlen=num_nodes,
        min_seqlen=num_nodes,
        seqstart_py=offsets,
    )
    keys = _GappySeqInfo(
        seqstart=firsts,
        max_seqlen=limit,
        min_seqlen=0,
        seqstart_py=[0] * (num_rows + 1),
        seqlen=torch.where(is_read, ends, 0).clamp(max=limit).int(),
        seqlen_py=[limit] * num_rows,
    )
    return PagedBlockDiagonalGappyKeysMask(queries, keys, tables, block_size)
