"""Tensors that drafting and verification hand to each other. How they are computed is left to `draft` and
`sampling`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.tree.topology import TreeTopology


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

    def ancestor_mask(self) -> Tensor:
        """Return [B, N, N] bool: may node i (dim 1) attend to node j (dim 2)?"""
        bit = torch.arange(self.num_nodes, device=self.ancestor_bits.device)
        return (self.ancestor_bits[:, :, None] >> bit & 1).bool()

    @staticmethod
    def build(topologies: tuple[TreeTopology, ...], num_nodes: int, device: torch.device) -> "TreeTensors":
        """Build the node table of `topologies`, one per row, padded to `num_nodes`."""
        assert all(t.num_nodes <= num_nodes for t in topologies), (num_nodes, [t.name for t in topologies])

        def table(rows: list[list[int]]) -> Tensor:
            return torch.tensor(rows, dtype=torch.int64, device=device)

        pads = [num_nodes - t.num_nodes for t in topologies]
        bits = [
            [_signed(b) for b in t.ancestor_bits]
            + [_signed(1 << node) for node in range(t.num_nodes, num_nodes)]
            for t in topologies
        ]
        levels = []
        for depth in range(1, max(t.depth for t in topologies) + 1):
            nodes = [list(t.levels[depth]) if depth <= t.depth else [] for t in topologies]
            width = max(len(row) for row in nodes)
            levels.append(table([row + [num_nodes] * (width - len(row)) for row in nodes]))
        return TreeTensors(
            parents=table([[0, *t.parents[1:]] + [0] * pad for t, pad in zip(topologies, pads, strict=True)]),
            depths=table([[*t.depths] + [0] * pad for t, pad in zip(topologies, pads, strict=True)]),
            ranks=table([[*t.ranks] + [0] * pad for t, pad in zip(topologies, pads, strict=True)]),
            ancestor_bits=table(bits),
            is_node=torch.arange(num_nodes, device=device) < table([[t.num_nodes] for t in topologies]),
            level_nodes=tuple(levels),
            max_rank=max(t.max_rank for t in topologies),
        )


def _signed(bits: int) -> int:
    """Fold an unsigned 64-bit mask into int64, which has no other way to hold bit 63."""
    return bits - (1 << 64) if bits >= 1 << 63 else bits


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """Drafted tokens of one step. token_ids: [B, N] int64 over the target's vocabulary; column 0 is the root,
    padding is -1. probs: [B, N, V] float32, the draft's distribution q *at* each node (rows of leaves are
    unread), present only where children were sampled without replacement in rank order."""

    token_ids: Tensor
    probs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """How each of B rows draws its tokens, as device data.

    temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty: [B] float32;
    temperature 0 is greedy. top_k: [B] int64, V where off. seed: [B] int64. bias_token_ids: [B, K] int64 and
    bias_values: [B, K] float32, padded with token 0 and bias 0. prompt_mask: [B, V] bool (tokens of the
    prompt), output_counts: [B, V] int32 (emitted so far); both are [B, 0] unless `is_penalized`.
    stop_token_ids: [B, S] int64 padded with -1, which may not be drawn at a position before stop_from: [B]
    int64. The flags are host facts about the whole batch; where one is False the step does no such work.
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
