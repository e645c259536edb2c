"""Drafting a tree: bring the draft's cache up to the root, then expand level by level.

What the rows are and when to draft is left to the runner; judging the drafts to `sampling/verify`.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.backend import AttentionBackend, AttentionLayout, PrefillLayout
from engine.batch import NUM_RANKS
from engine.config import DraftMode
from engine.draft.head import DraftHead
from engine.kvcache.kv_pool import KVPool, slots_of
from engine.layers.rotary import Angles
from engine.sampling.sampler import best_children, sample_children
from engine.speculation import DraftOutput, TreeTensors


@dataclass(frozen=True, slots=True)
class AlignWindow:
    """A consecutive positions of each row, of which the pending ones lack draft K/V; before them it is
    cached.

    positions: [B, A] int64, ending at the root where a tree is drafted; is_pending: [B, A] bool, True at the
    last. token_ids: [B, A] int64; features: [B, A, F], the target's taps of the position before. The cached
    window is [prefix_start, prefix_end), both [B] int64, where prefix_end is the first pending position.
    block_tables: [B, P] int64 reach past the root.
    """

    positions: Tensor
    is_pending: Tensor
    token_ids: Tensor
    features: Tensor
    prefix_start: Tensor
    prefix_end: Tensor
    block_tables: Tensor


@dataclass(frozen=True, slots=True)
class PromptPairs:
    """Stretches of prompts side by side, M positions in all: positions, token_ids [M] int64 and features
    [M, F], the target's taps of the position before. slots: [M] int64, where their draft K/V go (0: nowhere).
    """

    token_ids: Tensor
    positions: Tensor
    features: Tensor
    slots: Tensor
    layout: PrefillLayout


@dataclass(frozen=True, slots=True)
class DraftNoise:
    """What sampled drafting needs of each row: seed [B] int64 and temperature [B] float32."""

    seed: Tensor
    temperature: Tensor


class TreeDrafter(Protocol):
    """Whatever can propose the tokens of a tree. Its proposals change the speed of a step, never its
    output.
    """

    def fill(self, pairs: PromptPairs) -> None:
        """Take note of stretches of prompts."""

    def draft(
        self, window: AlignWindow, tree: TreeTensors, mode: DraftMode, noise: DraftNoise, vocab_size: int
    ) -> DraftOutput:
        """Fill the tree of each row."""


class Drafter:
    """A draft head with its own pages.

    Pages hold pairs made of the target's true features only, one per committed token: nodes of a tree live in
    the scratch and are dropped, so a rejected draft can leave no ghost and an accepted one no drifted
    feature.
    """

    def __init__(self, head: DraftHead, pool: KVPool, backend: AttentionBackend, block_size: int) -> None:
        self.head = head
        self.pool = pool
        self.backend = backend
        self.block_size = block_size

    def fill(self, pairs: PromptPairs) -> None:
        """Cache the K/V of `pairs`."""
        attend_chunks = self.backend.bind_prefill(pairs.layout, self.block_size)

        def attend(layer_idx: int, qkv: Tensor, angles: Angles) -> Tensor:
            q = self.head.ops.rope_store(qkv, angles, *self.pool.rows(layer_idx), pairs.slots)
            return attend_chunks(q, self.pool.k[layer_idx], self.pool.v[layer_idx])

        self.head(pairs.token_ids, self.head.fuse(pairs.features), pairs.positions, attend)

    def draft(
        self, window: AlignWindow, tree: TreeTensors, mode: DraftMode, noise: DraftNoise, vocab_size: int
    ) -> DraftOutput:
        """Fill the tree of each row: `mode` "greedy" takes the best children, "sampled" draws without
        replacement.
        """
        feature, hidden = self._align(window)
        expansion = _Expansion(self, window, tree, mode, noise, vocab_size)
        root = torch.zeros_like(window.positions[:, -1:])
        expansion.set_children(root, feature[:, -1:], hidden[:, -1:], 0)
        for depth, nodes in enumerate(tree.level_nodes, start=1):
            expansion.take(nodes)
            if depth < tree.depth:
                expansion.run(nodes, depth)
        return expansion.output()

    def _align(self, window: AlignWindow) -> tuple[Tensor, Tensor]:
        """Run the window's pairs and store the pending ones; return (feature [B, A, H], hidden [B, A, H])."""
        num_rows, width = window.positions.shape
        earlier = torch.ones(width, width, dtype=torch.bool, device=window.positions.device).tril()
        itself = torch.eye(width, dtype=torch.bool, device=window.positions.device)
        layout = AttentionLayout(
            block_tables=window.block_tables,
            prefix_start=window.prefix_start[:, None].expand(num_rows, width),
            prefix_end=window.prefix_end[:, None].expand(num_rows, width),
            suffix_mask=(earlier & window.is_pending[:, None, :]) | itself,
        )
        attend_pages = self.backend.bind(layout, self.block_size)
        slots = slots_of(window.block_tables, window.positions, window.is_pending, self.block_size).flatten()
        scratch, ops = self.pool.scratch(num_rows * width), self.head.ops

        def attend(layer_idx: int, qkv: Tensor, angles: Angles) -> Tensor:
            q = ops.rope_store(qkv, angles, scratch.k[layer_idx], scratch.v[layer_idx])
            pages = self.pool.k[layer_idx], self.pool.v[layer_idx]
            suffix = scratch.layer(layer_idx, num_rows)
            return attend_pages(q.view(num_rows, width, *q.shape[1:]), *suffix, *pages).flatten(0, 1)

        fused = self.head.fuse(window.features.flatten(0, 1))
        positions = window.positions.clamp(min=0).flatten()
        feature, hidden = self.head(window.token_ids.flatten(), fused, positions, attend)
        self.pool.commit(slots, scratch, torch.arange(num_rows * width, device=slots.device))
        return feature.view(num_rows, width, -1), hidden.view(num_rows, width, -1)


class _Expansion:
    """One tree per row while it grows. Tables have N + 1 columns: padding nodes are column N, which nobody
    reads.
    """

    def __init__(
        self,
        drafter: Drafter,
        window: AlignWindow,
        tree: TreeTensors,
        mode: DraftMode,
        noise: DraftNoise,
        vocab_size: int,
    ) -> None:
        self._drafter = drafter
        self._window = window
        self._tree = tree
        self._noise = noise
        num_rows, num_nodes = tree.parents.shape
        device = tree.parents.device
        self._rows = torch.arange(num_rows, device=device)[:, None]
        self._parents = _pad_column(tree.parents)
        self._ranks = _pad_column(tree.ranks)
        self._mask = _suffix_mask(tree)
        self._scratch = drafter.pool.scratch(num_rows * (num_nodes + 1)).zero_()
        self._tokens = torch.full((num_rows, num_nodes + 1), -1, dtype=torch.int64, device=device)
        self._tokens[:, 0] = window.token_ids[:, -1]
        # Drafted greedily, more ranks than the tree has children cost nothing, and tell what wider trees
        # would bring.
        num_ranks = tree.max_rank + 1 if mode == "sampled" else max(tree.max_rank + 1, NUM_RANKS)
        num_ranks = min(num_ranks, drafter.head.target_ids.shape[0])
        self._children = torch.full(
            (num_rows, num_nodes + 1, num_ranks), -1, dtype=torch.int64, device=device
        )
        hidden_size, dtype = drafter.head.config.hidden_size, drafter.head.embed_rows.dtype
        self._features = torch.zeros(num_rows, num_nodes + 1, hidden_size, dtype=dtype, device=device)
        self._probs: Tensor | None = None
        if mode == "sampled":
            self._probs = torch.zeros(num_rows, num_nodes + 1, vocab_size, device=device)

    def set_children(self, nodes: Tensor, feature: Tensor, hidden: Tensor, depth: int) -> None:
        """Choose the children of nodes [B, W] at `depth` from the head's output [B, W, H]."""
        head, count = self._drafter.head, self._children.shape[2]
        # Flat, since a batched product of strided rows copies the weight.
        logits = head.logits(hidden.flatten(0, 1))
        if self._probs is None:
            draft_ids = best_children(logits, count).view(*nodes.shape, -1)
        else:
            draft_ids = self._sample(nodes, logits.float().view(*nodes.shape, -1), depth)
        self._children[self._rows, nodes] = head.target_ids[draft_ids]
        self._features[self._rows, nodes] = feature

    def take(self, nodes: Tensor) -> None:
        """Set the tokens of nodes [B, W] from what their parents chose."""
        parents, ranks = self._parents.gather(1, nodes), self._ranks.gather(1, nodes)
        self._tokens.scatter_(1, nodes, self._children[self._rows, parents, ranks])

    def run(self, nodes: Tensor, depth: int) -> None:
        """Run the head on nodes [B, W] of one level and choose their children."""
        window, drafter = self._window, self._drafter
        num_rows, width = nodes.shape
        root_position = window.positions[:, -1:]
        layout = AttentionLayout(
            block_tables=window.block_tables,
            prefix_start=window.prefix_start[:, None].expand(num_rows, width),
            prefix_end=(root_position + 1).expand(num_rows, width),
            suffix_mask=self._mask[self._rows, nodes],
        )
        attend_pages = drafter.backend.bind(layout, drafter.block_size)
        scratch_rows = (self._rows * self._mask.shape[2] + nodes).flatten()

        def attend(layer_idx: int, qkv: Tensor, angles: Angles) -> Tensor:
            k, v = self._scratch.k[layer_idx], self._scratch.v[layer_idx]
            q = drafter.head.ops.rope_store(qkv, angles, k, v, scratch_rows)
            pages = drafter.pool.k[layer_idx], drafter.pool.v[layer_idx]
            suffix = self._scratch.layer(layer_idx, num_rows)
            return attend_pages(q.view(num_rows, width, *q.shape[1:]), *suffix, *pages).flatten(0, 1)

        features = self._features[self._rows, self._parents.gather(1, nodes)].flatten(0, 1)
        token_ids = self._tokens.gather(1, nodes).flatten()
        positions = (root_position + depth).expand(num_rows, width).flatten()
        feature, hidden = drafter.head(token_ids, features, positions, attend)
        self.set_children(nodes, feature.view(num_rows, width, -1), hidden.view(num_rows, width, -1), depth)

    def output(self) -> DraftOutput:
        """Return the finished trees, padding column dropped."""
        num_nodes = self._tree.num_nodes
        if self._probs is not None:
            return DraftOutput(self._tokens[:, :num_nodes], self._probs[:, :num_nodes])
        children = self._children[:, :num_nodes, :NUM_RANKS]
        children = F.pad(children, (0, NUM_RANKS - children.shape[2]), value=-1)
        return DraftOutput(self._tokens[:, :num_nodes], children=children)

    def _sample(self, nodes: Tensor, logits: Tensor, depth: int) -> Tensor:
        """Draw children without replacement from q = softmax(logits / T) and keep q; return draft ids [B, W,
        K].
        """
        assert self._probs is not None
        temperature = self._noise.temperature.clamp(min=1e-2)[:, None, None]
        log_q = (logits / temperature).log_softmax(-1)
        width = nodes.shape[1]
        # Nodes of one depth share their noise: only one of them can be on the accepted path.
        draft_ids = sample_children(
            log_q.flatten(0, 1),
            self._children.shape[2],
            self._noise.seed.repeat_interleave(width),
            (self._window.positions[:, -1] + depth + 1).repeat_interleave(width),
        ).view(*nodes.shape, -1)
        full = torch.zeros(*nodes.shape, self._probs.shape[2], device=logits.device)
        full[..., self._drafter.head.target_ids] = log_q.exp()
        self._probs[self._rows, nodes] = full
        return draft_ids


def _pad_column(table: Tensor) -> Tensor:
    """Return table [B, N] with a zero column for padding nodes."""
    return F.pad(table, (0, 1))


def _suffix_mask(tree: TreeTensors) -> Tensor:
    """Return [B, N + 1, N + 1] bool over the scratch: ancestors but the root, which is in the pages
    already.
    """
    mask = F.pad(tree.ancestor_mask(), (0, 1, 0, 1))
    mask[:, :, 0].fill_(False)
    mask[:, -1, -1].fill_(True)
    return mask
