"""Tensors that drafting and verification hand to each other. How they are computed is left to `draft` and
`sampling`.
"""

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.request import SamplingParams
from engine.tree.topology import TreeTopology


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The sizes that the tensors of a step follow from: nodes, the width of each level below the root, and
    the largest sibling rank.
    """

    num_nodes: int
    widths: tuple[int, ...]
    max_rank: int

    @staticmethod
    def of(topologies: Iterable[TreeTopology]) -> "TreeShape":
        """Return the smallest shape that covers every one of `topologies`."""
        trees = set(topologies)
        levels = itertools.zip_longest(*(tree.levels[1:] for tree in trees), fillvalue=())
        return TreeShape(
            num_nodes=max(tree.num_nodes for tree in trees),
            widths=tuple(max(map(len, level)) for level in levels),
            max_rank=max(tree.max_rank for tree in trees),
        )

    @property
    def depth(self) -> int:
        return len(self.widths)

    def covers(self, other: "TreeShape") -> bool:
        """Return whether trees of shape `other` fit into tensors of this shape."""
        return (
            self.num_nodes >= other.num_nodes
            and self.depth >= other.depth
            and self.max_rank >= other.max_rank
            and all(mine >= theirs for mine, theirs in zip(self.widths, other.widths, strict=False))
        )


@dataclass(frozen=True, slots=True)
class TreeTensors:
    """The topologies of one step as device data: a row each, padded to N nodes and D levels.

    parents, depths, ranks: [B, N] int64, where the root and padding hold 0. ancestor_bits: [B, N] int64, the
    node itself included; padding sees only itself, so that a softmax over its row is finite. is_node: [B, N]
    bool. columns: [B, C] int64, the ids of all nodes but the root, where the level at depth d has the next
    widths[d - 1] columns, padded with N. ancestor_mask: [B, N, N] bool, may node i (dim 1) attend to node j
    (dim 2)? column_mask: [B, C, C] bool, the same between columns, padding seeing only itself. widths and
    max_rank, the largest rank in the step, are host integers, as the shapes are.
    """

    parents: Tensor
    depths: Tensor
    ranks: Tensor
    ancestor_bits: Tensor
    is_node: Tensor
    columns: Tensor
    ancestor_mask: Tensor
    column_mask: Tensor
    widths: tuple[int, ...]
    max_rank: int

    @property
    def num_rows(self) -> int:
        return self.parents.shape[0]

    @property
    def num_nodes(self) -> int:
        return self.parents.shape[1]

    @property
    def depth(self) -> int:
        return len(self.widths)

    @property
    def shape(self) -> TreeShape:
        return TreeShape(self.num_nodes, self.widths, self.max_rank)

    def level(self, depth: int) -> slice:
        """Return the columns of the nodes at `depth`, from 1 to D."""
        start = sum(self.widths[: depth - 1])
        return slice(start, start + self.widths[depth - 1])

    def level_nodes(self, depth: int) -> Tensor:
        """Return the node ids at `depth`, [B, W_d] int64, padded with N; at depth 0 the root alone."""
        return self.columns[:, self.level(depth)] if depth else torch.zeros_like(self.parents[:, :1])

    @staticmethod
    def build(topologies: tuple[TreeTopology, ...], num_nodes: int, device: torch.device) -> "TreeTensors":
        """Build the node table of `topologies`, one per row, padded to `num_nodes`."""
        shape = dataclasses.replace(TreeShape.of(topologies), num_nodes=num_nodes)
        return TreeTensors.padded(topologies, shape, device)

    @staticmethod
    def padded(topologies: tuple[TreeTopology, ...], shape: TreeShape, device: torch.device) -> "TreeTensors":
        """Build the node table of `topologies`, one per row, padded to `shape`, which covers them all."""
        assert shape.covers(TreeShape.of(topologies)), (shape, [t.name for t in topologies])
        num_nodes = shape.num_nodes

        def table(rows: list[list[int]]) -> Tensor:
            values = [value for row in rows for value in row]
            return upload(values, torch.int64, device).view(len(rows), len(rows[0]))

        pads = [num_nodes - t.num_nodes for t in topologies]
        bits = [
            [_signed(b) for b in t.ancestor_bits]
            + [_signed(1 << node) for node in range(t.num_nodes, num_nodes)]
            for t in topologies
        ]
        levels = [
            [[*t.levels[depth]] if depth <= t.depth else [] for depth in range(1, shape.depth + 1)]
            for t in topologies
        ]
        columns = [
            [
                node
                for level, width in zip(row, shape.widths, strict=True)
                for node in level + [num_nodes] * (width - len(level))
            ]
            for row in levels
        ]
        ancestor_bits, column_table = table(bits), table(columns)
        return TreeTensors(
            parents=table([[0, *t.parents[1:]] + [0] * pad for t, pad in zip(topologies, pads, strict=True)]),
            depths=table([[*t.depths] + [0] * pad for t, pad in zip(topologies, pads, strict=True)]),
            ranks=table([[*t.ranks] + [0] * pad for t, pad in zip(topologies, pads, strict=True)]),
            ancestor_bits=ancestor_bits,
            is_node=torch.arange(num_nodes, device=device) < table([[t.num_nodes] for t in topologies]),
            columns=column_table,
            ancestor_mask=_ancestor_mask(ancestor_bits),
            column_mask=_column_mask(ancestor_bits, column_table),
            widths=shape.widths,
            max_rank=shape.max_rank,
        )

    def copy_(self, other: "TreeTensors") -> None:
        """Take over the node table of `other`, which has the same shape."""
        for mine, theirs in zip(self.tables, other.tables, strict=True):
            mine.copy_(theirs)

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """Every tensor of the node table."""
        nodes = (self.parents, self.depths, self.ranks, self.ancestor_bits, self.is_node)
        return (*nodes, self.columns, self.ancestor_mask, self.column_mask)


def _ancestor_mask(ancestor_bits: Tensor) -> Tensor:
    """Return [B, N, N] bool of bits [B, N]."""
    bit = torch.arange(ancestor_bits.shape[1], device=ancestor_bits.device)
    return (ancestor_bits[:, :, None] >> bit & 1).bool()


def _column_mask(ancestor_bits: Tensor, columns: Tensor) -> Tensor:
    """Return [B, C, C] bool of bits [B, N] and node ids [B, C]."""
    num_nodes = ancestor_bits.shape[1]
    nodes, is_node = columns.clamp(max=num_nodes - 1), columns < num_nodes
    is_above = (ancestor_bits.gather(1, nodes)[:, :, None] >> nodes[:, None] & 1).bool()
    itself = torch.eye(columns.shape[1], dtype=torch.bool, device=columns.device)
    return is_above & is_node[:, :, None] & is_node[:, None] | itself


def upload(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `values` as a tensor on `device`, without making the host wait for it."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    # Only a copy from pinned memory is asynchronous; its allocator keeps the memory until the copy is done.
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def _signed(bits: int) -> int:
    """Fold an unsigned 64-bit mask into int64, which has no other way to hold bit 63."""
    return bits - (1 << 64) if bits >= 1 << 63 else bits


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """Drafted tokens of one step. token_ids: [B, N] int64 over the target's vocabulary; column 0 is the root,
    padding is -1. probs: [B, N, V] float32, the draft's distribution q *at* each node (rows of leaves are
    unread), present only where children were sampled without replacement in rank order. children: [B, N, R]
    int64, the R tokens that the draft chose at each node where it ran, else -1; the tree uses the first few.
    """

    token_ids: Tensor
    probs: Tensor | None = None
    children: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """What some row of a batch needs: host facts. Where one is False, the step does no such work."""

    is_sampled: bool = False
    is_truncated: bool = False
    is_penalized: bool = False
    is_biased: bool = False
    has_min_tokens: bool = False

    @staticmethod
    def of(params: SamplingParams) -> "SamplingFlags":
        return SamplingFlags(
            is_sampled=not params.is_greedy,
            is_truncated=params.is_truncated and not params.is_greedy,
            is_penalized=params.is_penalized,
            is_biased=bool(params.logit_bias),
            has_min_tokens=params.min_tokens > 0,
        )

    def __or__(self, other: "SamplingFlags") -> "SamplingFlags":
        return SamplingFlags(*map(operator.or_, dataclasses.astuple(self), dataclasses.astuple(other)))


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """How each of B rows draws its tokens, as device data.

    temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty: [B] float32;
    temperature 0 is greedy. top_k: [B] int64, V where off. seed: [B] int64. bias_token_ids: [B, K] int64 and
    bias_values: [B, K] float32, padded with token 0 and bias 0. prompt_mask: [B, V] bool (tokens of the
    prompt), output_counts: [B, V] int32 (emitted so far); both are [B, 0] unless `is_penalized`.
    stop_token_ids: [B, S] int64 padded with -1, which may not be drawn at a position before stop_from: [B]
    int64. The flags are those of `SamplingFlags`.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    seed: Tensor
    bias_token_ids: Tensor
    bias_values: Tensor
    prompt_mask: Tensor
    output_counts: Tensor
    stop_token_ids: Tensor
    stop_from: Tensor
    is_sampled: bool
    is_truncated: bool
    is_penalized: bool
    is_biased: bool
    has_min_tokens: bool


@dataclass(frozen=True, slots=True)
class Verification:
    """What a step emitted. D is the depth of the step's deepest tree.

    path: [B, D + 1] int64, the node ids of the accepted path from the root (path[:, 0] == 0), padded by
    repeating the last accepted node. num_accepted: [B] int64 counts drafts only. next_token: [B] int64 is the
    bonus or residual token. token_ids: [B, D + 1] int64, the emitted tokens: accepted drafts, then next_token
    at index num_accepted, then -1. is_finite: [B] bool is False where a logit row on the path held NaN or
    +inf or had no finite entry: nothing is accepted there, and next_token is 0.
    """

    path: Tensor
    num_accepted: Tensor
    next_token: Tensor
    token_ids: Tensor
    is_finite: Tensor
