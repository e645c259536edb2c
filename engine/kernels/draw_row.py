"""The rows that one launch draws from: which logits they read, and the state they keep between launches.

The row of a launch is a (batch row, node) pair: every node of every tree at once, or the node that each batch
row stands on. What happens in a row is left to `truncation` and `sampling`.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

# The state of a row, int64 words that begin as 0. BEST: the leading token, packed; PEAK: the key of the
# largest logit; NUM_DONE: programs that finished, over all launches; PREFIX, AHEAD: the digits found of the
# threshold, and the weight ahead of them; BUDGET: where the mass search ends; THRESHOLD, NUM_TIES: kept are
# keys above the threshold and the first NUM_TIES tokens on it. NODE, IS_CLOSED and NUM_DRAWN belong to a
# batch row.
BEST = tl.constexpr(0)
PEAK = tl.constexpr(1)
NUM_DONE = tl.constexpr(2)
PREFIX = tl.constexpr(3)
AHEAD = tl.constexpr(4)
BUDGET = tl.constexpr(5)
THRESHOLD = tl.constexpr(6)
NUM_TIES = tl.constexpr(7)
NODE = tl.constexpr(8)
IS_CLOSED = tl.constexpr(9)
NUM_DRAWN = tl.constexpr(10)
BINS = tl.constexpr(16)
NUM_BINS = tl.constexpr(256)
ROW_WORDS = tl.constexpr(272)

_PROGRAMS_WANTED = 1024
_MIN_CHUNK = 1024
_MAX_CHUNK = 16384
# How many low bits of a float32 key are always equal where the logits came in a shorter type.
_FREE_KEY_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


@dataclass(frozen=True, slots=True)
class DrawRows:
    """R rows of V logits, each split over S programs of `chunk` tokens.

    logits: [B, N, V] (or [B, V] where each batch row stands on one node and its logits were gathered);
    state: [R, ROW_WORDS] int64; tie_counts: [R, S, 256] int32, written by the last digit of a search.
    """

    logits: Tensor
    is_node: Tensor
    state: Tensor
    tie_counts: Tensor
    chunk: int
    is_every_node: bool

    @staticmethod
    def build(logits: Tensor, is_node: Tensor, *, is_every_node: bool, is_truncated: bool) -> "DrawRows":
        """Allocate fresh state for logits [B, N, V] and trees is_node [B, N]."""
        num_rows = is_node.numel() if is_every_node else is_node.shape[0]
        vocab_size = logits.shape[-1]
        chunk = triton.next_power_of_2(triton.cdiv(num_rows * vocab_size, _PROGRAMS_WANTED))
        chunk = min(max(chunk, _MIN_CHUNK), _MAX_CHUNK)
        num_splits = triton.cdiv(vocab_size, chunk) if is_truncated else 0
        state = torch.zeros(num_rows, ROW_WORDS.value, dtype=torch.int64, device=logits.device)
        tie_counts = torch.empty(
            num_rows, num_splits, NUM_BINS.value, dtype=torch.int32, device=logits.device
        )
        return DrawRows(logits, is_node, state, tie_counts, chunk, is_every_node)

    def reading(self, logits: Tensor) -> "DrawRows":
        """Return the same rows over other logits, as when each level has its own."""
        return replace(self, logits=logits)

    @property
    def grid(self) -> tuple[int, int]:
        return (self.state.shape[0], triton.cdiv(self.logits.shape[-1], self.chunk))

    @property
    def key_shift(self) -> int:
        return _FREE_KEY_BITS[self.logits.dtype]

    @property
    def arguments(self) -> tuple[object, ...]:
        """The leading arguments of every kernel, in order: see `locate_row`."""
        *outer, inner = self.logits.stride()
        node_stride = outer[1] if len(outer) == 2 else 0
        num_nodes, vocab_size = self.is_node.shape[1], self.logits.shape[-1]
        shape = (num_nodes, vocab_size, outer[0], node_stride, inner)
        return (self.logits, self.state, self.is_node.view(torch.uint8), *shape)


@triton.jit
def locate_row(logits_ptr, state_ptr, is_node_ptr, num_nodes, row_stride, node_stride, EVERY: tl.constexpr):
    """Return of this program's row: its batch row, its node, whether it is drawn, and where its logits and
    its state are.
    """
    row = tl.program_id(0)
    state = state_ptr + row.to(tl.int64) * ROW_WORDS
    if EVERY:
        batch_row = row // num_nodes
        node = (row % num_nodes).to(tl.int64)
        is_drawn = tl.load(is_node_ptr + row) != 0
    else:
        batch_row = row
        node = tl.load(state + NODE)
        is_drawn = tl.load(state + IS_CLOSED) == 0
    logits = logits_ptr + batch_row.to(tl.int64) * row_stride + node * node_stride
    return batch_row, node, is_drawn, logits, state


@triton.jit
def is_last_program(counter_ptr, num_programs):
    """Count this program as done; return whether it is the last of `num_programs`, which then sees all that
    the others wrote (through L2: load it with `.cg`). The counter may run on through several launches.
    """
    tl.debug_barrier()
    num_done = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
    return (num_done + 1) % num_programs == 0
