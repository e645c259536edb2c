"""The rows that one launch draws from: which logits they read, and the state they keep between launches.

The row of a launch is a (batch row, node) pair: every node of every tree at once, or the node that each batch
row stands on. What happens in a row is left to `top_k_floor`,
`draw` and `sift`.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# The state of a row, int64 words that begin as 0. BEST: the token drawn, packed with the key of its score.
# NUM_DONE: programs that finished, over several launches. PREFIX, FLOOR, NUM_TIES: of the search for top-k:
# the digits found; kept are keys above the floor and the first NUM_TIES tokens on it. PEAK: the key of the
# largest logit. AHEAD: the number, later the weight, of tokens ahead of one; TOTAL: the weight of all that
# top-k keeps. NEXT: the token to draw if BEST may not be; IS_SETTLED: it may. NODE, IS_CLOSED: where a batch
# row stands, and whether its path has ended; NUM_DRAWN: programs that drew for it. Then the bins of a digit.
BEST = tl.constexpr(0)
NUM_DONE = tl.constexpr(1)
PREFIX = tl.constexpr(2)
FLOOR = tl.constexpr(3)
NUM_TIES = tl.constexpr(4)
PEAK = tl.constexpr(5)
AHEAD = tl.constexpr(6)
TOTAL = tl.constexpr(7)
NEXT = tl.constexpr(8)
IS_SETTLED = tl.constexpr(9)
NODE = tl.constexpr(10)
IS_CLOSED = tl.constexpr(11)
NUM_DRAWN = tl.constexpr(12)
BINS = tl.constexpr(16)
NUM_BINS = tl.constexpr(256)
ROW_WORDS = tl.constexpr(272)

# Programs of one launch that fill a large GPU; more rows than that get longer chunks.
_PROGRAMS_WANTED = 2048
_MIN_CHUNK = 1024
_MAX_CHUNK = 16384
# How many low bits of a float32 key say nothing where the logits came in a shorter type.
_IDLE_KEY_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


class Column(NamedTuple):
    """One number per batch row, `stride` apart."""

    numbers: Tensor
    stride: int


class RowArguments(NamedTuple):
    """What every kernel over rows reads; the strides are those of the batch row, the node and the token."""

    logits: Tensor
    state: Tensor
    is_node: Tensor
    num_nodes: int
    vocab_size: int
    chunk: int
    row_stride: int
    node_stride: int
    token_stride: int


@dataclass(frozen=True, slots=True)
class DrawRows:
    """R rows of V logits, each split over S programs of `chunk` tokens.

    logits: [B, N, V], or [B, V] where the logits of the nodes that the rows stand on were gathered; state:
    [R, ROW_WORDS] int64; tie_counts: [R, S, NUM_BINS] int32, or empty without truncation.
    """

    logits: Tensor
    is_node: Tensor
    state: Tensor
    tie_counts: Tensor
    chunk: int
    is_every_node: bool
    overlap: bool

    @staticmethod
    def build(
        logits: Tensor, is_node: Tensor, *, is_every_node: bool, is_truncated: bool, overlap: bool
    ) -> "DrawRows":
        """Allocate fresh state for logits [B, N, V] and trees is_node [B, N]."""
        num_rows = is_node.numel() if is_every_node else is_node.shape[0]
        vocab_size = logits.shape[-1]
        chunk = triton.next_power_of_2(triton.cdiv(num_rows * vocab_size, _PROGRAMS_WANTED))
        chunk = min(max(chunk, _MIN_CHUNK), _MAX_CHUNK)
        num_splits = triton.cdiv(vocab_size, chunk) if is_truncated else 0
        state = torch.zeros(num_rows, ROW_WORDS.value, dtype=torch.int64, device=logits.device)
        ties = torch.empty(num_rows, num_splits, NUM_BINS.value, dtype=torch.int32, device=logits.device)
        return DrawRows(logits, is_node, state, ties, chunk, is_every_node, overlap)

    def reading(self, logits: Tensor) -> "DrawRows":
        """Return the same rows over other logits, as when each level has its own."""
        return replace(self, logits=logits)

    @property
    def grid(self) -> tuple[int, int]:
        return (self.state.shape[0], triton.cdiv(self.logits.shape[-1], self.chunk))

    @property
    def num_key_bits(self) -> int:
        """How many high bits of a key tell logits apart."""
        return 32 - _IDLE_KEY_BITS[self.logits.dtype]

    @property
    def options(self) -> dict[str, bool | int]:
        """The constants of every kernel, and how it is compiled: without fusion, so that what is computed of
        a logit rounds alike in every kernel, and as in torch.
        """
        constants = {"EVERY": self.is_every_node, "KEY_SHIFT": _IDLE_KEY_BITS[self.logits.dtype]}
        return {
            **constants,
            "OVERLAP": self.overlap,
            "launch_pdl": self.overlap,
            "enable_fp_fusion": False,
        }

    @property
    def arguments(self) -> RowArguments:
        row_stride, *node_stride, token_stride = self.logits.stride()
        return RowArguments(
            *(self.logits, self.state, self.is_node.view(torch.uint8)),
            *(self.is_node.shape[1], self.logits.shape[-1], self.chunk),
            *(row_stride, *(node_stride or (0,)), token_stride),
        )


def column(numbers: Tensor) -> Column:
    """Return numbers [B], however they lie, as an argument."""
    return Column(numbers, numbers.stride(0))


@triton.jit
def value_at(column, idx) -> tl.tensor:
    """Return the number of batch row `idx`."""
    return tl.load(column.numbers + idx * column.stride)


@triton.jit
def locate_row(rows, EVERY: tl.constexpr, OVERLAP: tl.constexpr) -> tl.tuple:
    """Return of this program's row: its batch row, its node, whether it is drawn, and where its logits and
    its state are. Waits for the launch before, and lets the next one come near.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    state = rows.state + row.to(tl.int64) * ROW_WORDS
    if EVERY:
        batch_row = row // rows.num_nodes
        node = (row % rows.num_nodes).to(tl.int64)
        is_drawn = tl.load(rows.is_node + row) != 0
    else:
        batch_row = row
        node = tl.load(state + NODE)
        is_drawn = tl.load(state + IS_CLOSED) == 0
    logits = rows.logits + batch_row.to(tl.int64) * rows.row_stride + node * rows.node_stride
    return batch_row, node, is_drawn, logits, state


@triton.jit
def load_logits(logits, rows, token_id) -> tl.tensor:
    """Return logits as float32, -inf beyond the vocabulary."""
    offset = token_id.to(tl.int64) * rows.token_stride
    return tl.load(logits + offset, token_id < rows.vocab_size, -float("inf")).to(tl.float32)


@triton.jit
def chunk_of_program(rows) -> tl.tuple:
    """Return the first token of this program's chunk, and the end of the chunk."""
    start = tl.program_id(1) * rows.chunk
    return start, tl.minimum(start + rows.chunk, rows.vocab_size)


@triton.jit
def is_last_program(counter, num_programs) -> tl.tensor:
    """Count this program as done; return whether it is the last of `num_programs`, which then sees all that
    the others wrote (through L2: load it with `.cg`). The counter may run on through several launches.
    """
    tl.debug_barrier()
    num_done = tl.atomic_add(counter, 1, sem="acq_rel")
    return (num_done + 1) % num_programs == 0
