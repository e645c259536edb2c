"""Drafting a tree: bring the draft's cache up to the root, then expand level by level.

What the rows are and when to draft is left to the runner; judging the drafts to `sampling/verify`.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend, AttentionLayout, PrefillLayout
from engine.draft.network import DraftNetwork
from engine.draft.ops import DraftOps, TorchDraftOps, place_children
from engine.draft.pairs import HeadInput
from engine.kvcache.kv_pool import KVPool
from engine.kvcache.tree_scratch import TreeScratch
from engine.layers.rotary import Angles
from engine.sampling.sampler import sample_children
from engine.speculation import DraftOutput, TreeTensors
from engine.step_rows import AlignWindow


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

    def draft(self, window: AlignWindow, tree: TreeTensors, noise: DraftNoise, draft: DraftOutput) -> None:
        """Fill in the tree of each row: `draft` holds the root, and -1 at every other node."""


class Drafter:
    """A draft head with its own pages.

    Pages hold pairs made of the target's true features only, one per committed token: nodes of a tree live in
    the scratch and are dropped, so a rejected draft can leave no ghost and an accepted one no drifted
    feature.
    """

    def __init__(
        self,
        head: DraftNetwork,
        pool: KVPool,
        backend: AttentionBackend,
        block_size: int,
        ops: DraftOps | None = None,
    ) -> None:
        self.head = head
        self.pool = pool
        self.backend = backend
        self.block_size = block_size
        self._ops = ops or TorchDraftOps()

    def fill(self, pairs: PromptPairs) -> None:
        """Cache the K/V of `pairs`."""
        layout = pairs.layout
        if not self.head.config.has_first_pair:
            layout = replace(layout, window_starts=layout.window_starts.clamp(min=1))
        attend_chunks = self.backend.bind_prefill(layout, self.block_size)

        def attend(layer_idx: int, qkv: Tensor, angles: Angles) -> Tensor:
            q = self.head.ops.rope_store(qkv, angles, *self.pool.rows(layer_idx), pairs.slots)
            return attend_chunks(q, *self.pool.layers[layer_idx])

        self.head(pairs.token_ids, self.head.fuse(pairs.features), pairs.positions, attend)

    def draft(self, window: AlignWindow, tree: TreeTensors, noise: DraftNoise, draft: DraftOutput) -> None:
        """Fill in the tree of each row: the best children of every node or, where `draft` has room for
        probabilities, children drawn without replacement.
        """
        window = self._drop_first_pair(window)
        feature, hidden, end = self._align(window)
        self._choose(tree, 0, hidden, noise, end, draft)
        scratch = self.pool.scratch(tree.columns.numel())
        for depth in range(1, tree.depth):
            level = tree.level(depth)
            # The columns of deeper levels are not written yet, nor seen.
            layout = AttentionLayout(
                block_tables=window.block_tables,
                prefix_start=window.prefix_start[:, None].expand(-1, tree.widths[depth - 1]),
                prefix_end=end[:, None].expand(-1, tree.widths[depth - 1]),
                suffix_mask=tree.column_mask[:, level, : level.stop],
            )
            opened = self._ops.open_level(self.head, tree, depth, feature, end, draft)
            feature, hidden = self._run(opened.pairs, layout, scratch, opened.rows)
            self._choose(tree, depth, hidden, noise, end, draft)

    def _drop_first_pair(self, window: AlignWindow) -> AlignWindow:
        """Hide position 0 from a head that was trained without a pair there."""
        if self.head.config.has_first_pair:
            return window
        start = window.prefix_start.clamp(min=1)
        return replace(
            window,
            is_pending=window.is_pending & (window.positions > 0),
            prefix_start=start,
            prefix_end=torch.maximum(window.prefix_end, start),
        )

    def _align(self, window: AlignWindow) -> tuple[Tensor, Tensor, Tensor]:
        """Run the window's pairs and store the pending ones; return feature and hidden of the last, both
        [B, 1, H], and the position after it, [B].
        """
        num_rows, width = window.positions.shape
        fused = self.head.fuse(window.features.flatten(0, 1))
        opened = self._ops.open_window(self.head, window, fused, self.block_size)
        layout = AttentionLayout(
            block_tables=window.block_tables,
            prefix_start=window.prefix_start[:, None].expand(num_rows, width),
            prefix_end=window.prefix_end[:, None].expand(num_rows, width),
            suffix_mask=opened.suffix_mask,
        )
        scratch = self.pool.scratch(num_rows * width)
        feature, hidden = self._run(opened.pairs, layout, scratch, None)
        self.pool.commit(opened.slots, scratch)
        return feature[:, -1:], hidden[:, -1:], opened.end

    def _run(
        self, pairs: HeadInput, layout: AttentionLayout, scratch: TreeScratch, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run B * W pairs whose K/V go to `rows` of the scratch (None: in order); return feature and hidden,
        both [B, W, H].
        """
        num_rows, width, num_keys = layout.suffix_mask.shape
        attend_pages = self.backend.bind(layout, self.block_size)
        layers = scratch.layers(num_rows)

        def attend(layer_idx: int, qkv: Tensor, angles: Angles) -> Tensor:
            k_dest, v_dest, k, v = layers[layer_idx]
            q = self.head.ops.rope_store(qkv, angles, k_dest, v_dest, rows).view(
                num_rows, width, -1, k.shape[-1]
            )
            pages = self.pool.layers[layer_idx]
            return attend_pages(q, k[:, :num_keys], v[:, :num_keys], *pages).flatten(0, 1)

        feature, hidden = self.head.run(pairs, attend)
        return feature.view(num_rows, width, -1), hidden.view(num_rows, width, -1)

    def _choose(
        self,
        tree: TreeTensors,
        depth: int,
        hidden: Tensor,
        noise: DraftNoise,
        end: Tensor,
        draft: DraftOutput,
    ) -> None:
        """Choose the children of the nodes at `depth` from the head's output [B, W, H]."""
        # Flat, since a batched product of strided rows copies the weight.
        logits = self.head.logits(hidden.flatten(0, 1))
        if draft.probs is None:
            self._ops.choose(self.head, tree, depth, logits, draft)
        else:
            self._sample(tree, depth, logits, noise, end, draft, draft.probs)

    def _sample(
        self,
        tree: TreeTensors,
        depth: int,
        logits: Tensor,
        noise: DraftNoise,
        end: Tensor,
        draft: DraftOutput,
        probs: Tensor,
    ) -> None:
        """Draw children without replacement from q = softmax(logits / T), logits [B * W, V], and keep q."""
        assert draft.children is not None
        nodes = tree.level_nodes(depth)
        width = nodes.shape[1]
        temperature = noise.temperature.clamp(min=1e-2).repeat_interleave(width)
        log_q = (logits.float() / temperature[:, None]).log_softmax(-1)
        # Nodes of one depth share their noise: only one of them can be on the accepted path.
        draft_ids = sample_children(
            log_q,
            draft.children.shape[2],
            noise.seed.repeat_interleave(width),
            (end + depth).repeat_interleave(width),
        )
        place_children(tree, depth, self.head.target_ids[draft_ids], draft)
        full = torch.zeros(*nodes.shape, probs.shape[2], device=probs.device)
        full[..., self.head.target_ids] = log_q.exp().view(*nodes.shape, -1)
        row, is_node = torch.arange(len(nodes), device=nodes.device)[:, None], nodes < tree.num_nodes
        # Padding writes what the root holds to the root.
        probs[row, torch.where(is_node, nodes, 0)] = torch.where(is_node[..., None], full, probs[:, :1])
