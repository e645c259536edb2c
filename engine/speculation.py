"""Tensors that drafting and verification hand to each other. How they are computed is left to `draft` and
`sampling`.
"""

import dataclasses
import itertools
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
    bool. level_nodes: for d = 1..D a tensor [B, W_d] int64 of the node ids at depth d, padded with N.
    max_rank is the largest rank in the step: a host integer, as the shapes are.
    """

    parents: Tensor
    depths: Tensor
    ranks: Tensor
    ancestor_bits: Tensor
    is_node: Tensor
    level_nodes: tuple[Tensor, ...]
    max_rank: int

    @property
    def num_rows(self) -> int:
        return self.parents.shape[0]

    @property
    def num_nodes(self) -> int:
        return self.parents.shape[1]

    @property
    def depth(self) -> int:
        return len(self.level_nodes)

    @property
    def shape(self) -> TreeShape:
        widths = tuple(nodes.shape[1] for nodes in self.level_nodes)
        return TreeShape(self.num_nodes, widths, self.max_rank)

    def ancestor_mask(self) -> Tensor:
        """Return [B, N, N] bool: may node i (dim 1) attend to node j (dim 2)?"""
        bit = torch.arange(self.num_nodes, device=self.ancestor_bits.device)
        return (self.ancestor_bits[:, :, None] >> bit & 1).bool()

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
            return upload([value for row in rows for value in row], torch.int64, device).view(len(rows), -1)

        pads = [num_nodes - t.num_nodes for t in topologies]
        bits = [
            [_signed(b) for b in t.ancestor_bits]
            + [_signed(1 << node) for node in range(t.num_nodes, num_nodes)]
            for t in topologies
        ]
        levels = []
        for depth, width in enumerate(shape.widths, start=1):
            nodes = [list(t.levels[depth]) if depth <= t.depth else [] for t in topologies]
            levels.append(table([row + [num_nodes] * (width - len(row)) for row in nodes]))
        return TreeTensors(
            parents=table([[0, *t.parents[1:]] + [0] * pad for t, pad in zip(topologies, pads, strict=True)]),
            depths=table([[*t.depths] + [0] * pad for t, pad in zip(topologies, pads, strict=True)]),
            ranks=table([[*t.ranks] + [0] * pad for t, pad in zip(topologies, pads, strict=True)]),
            ancestor_bits=table(bits),
            is_node=torch.arange(num_nodes, device=device) < table([[t.num_nodes] for t in topologies]),
            level_nodes=tuple(levels),
            max_rank=shape.max_rank,
        )

    def copy_(self, other: "TreeTensors") -> None:
        """Take over the node table of `other`, which has the same shape."""
        for mine, theirs in zip(self.tables, other.tables, strict=True):
            mine.copy_(theirs)

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """Every tensor of the node table."""
        tables = (self.parents, self.depths, self.ranks, self.ancestor_bits, self.is_node)
        return tables + self.level_nodes


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
    int64, the draft's best R = NUM_RANKS tokens at each node where it ran, else -1; the tree uses the first
    few."""

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
        return SamplingFlags(
            is_sampled=self.is_sampled or other.is_sampled,
            is_truncated=self.is_truncated or other.is_truncated,
            is_penalized=self.is_penalized or other.is_penalized,
            is_biased=self.is_biased or other.is_biased,
            has_min_tokens=self.has_min_tokens or other.has_min_tokens,
        )


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
