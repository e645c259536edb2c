"""What drafting does around the passes of the head, behind one protocol, and its torch implementation.

The passes are left to `drafter`; a GPU's kernels are in `triton_ops`.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.draft.network import DraftNetwork
from engine.draft.pairs import HeadInput
from engine.kvcache.kv_pool import slots_of
from engine.sampling.sampler import best_children
from engine.speculation import DraftOutput, TreeTensors
from engine.step_rows import AlignWindow


@dataclass(frozen=True, slots=True)
class WindowPass:
    """A pass over the T = B * A pairs of a window.

    slots: [T] int64, where the K/V of each goes, the dummy block for what is not pending. suffix_mask:
    [B, A, A] bool: a pair reads itself and the pending pairs before it. end: [B] int64, the position after
    the window, from where the draft has no K/V.
    """

    pairs: HeadInput
    slots: Tensor
    suffix_mask: Tensor
    end: Tensor


@dataclass(frozen=True, slots=True)
class LevelPass:
    """A pass over the T = B * W nodes of one level; rows: [T] int64, where the K/V of each goes in a scratch
    of C columns per batch row.
    """

    pairs: HeadInput
    rows: Tensor


class DraftOps(Protocol):
    """What is done before and after the head runs."""

    def open_window(
        self, head: DraftNetwork, window: AlignWindow, fused: Tensor, block_size: int
    ) -> WindowPass:
        """Prepare the pass over a window with its features fused, [T, H]."""

    def open_level(
        self,
        head: DraftNetwork,
        tree: TreeTensors,
        depth: int,
        feature: Tensor,
        end: Tensor,
        draft: DraftOutput,
    ) -> LevelPass:
        """Prepare the pass over the nodes at `depth`, whose tokens are in `draft`.

        feature: [B, V, H], the head's of the V nodes of the level above. What padding reads is finite where
        all of it is, and means nothing else.
        """

    def choose(
        self, head: DraftNetwork, tree: TreeTensors, depth: int, logits: Tensor, draft: DraftOutput
    ) -> None:
        """Take the best children of the nodes at `depth` from logits [B * W, draft_vocab_size]: write the
        first R of each into `draft.children` and the tokens of the next level into `draft.token_ids`.
        """


class TorchDraftOps:
    """Plain torch on any device."""

    def open_window(
        self, head: DraftNetwork, window: AlignWindow, fused: Tensor, block_size: int
    ) -> WindowPass:
        width, device = window.positions.shape[1], window.positions.device
        earlier = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        itself = torch.eye(width, dtype=torch.bool, device=device)
        positions = window.positions.clamp(min=0).flatten()
        return WindowPass(
            pairs=head.open(window.token_ids.flatten(), fused, positions),
            slots=slots_of(window.block_tables, window.positions, window.is_pending, block_size).flatten(),
            suffix_mask=(earlier & window.is_pending[:, None, :]) | itself,
            end=window.positions[:, -1] + 1,
        )

    def open_level(
        self,
        head: DraftNetwork,
        tree: TreeTensors,
        depth: int,
        feature: Tensor,
        end: Tensor,
        draft: DraftOutput,
    ) -> LevelPass:
        """See `DraftOps`."""
        nodes, is_node = _known(tree, depth)
        num_rows, width = nodes.shape
        row = torch.arange(num_rows, device=nodes.device)[:, None]
        first = tree.level_nodes(depth - 1)[:, :1]
        # Nodes are numbered level by level, so those of a level are side by side in it.
        parents = torch.where(is_node, tree.parents.gather(1, nodes) - first, 0)
        level = tree.level(depth)
        columns = torch.arange(level.start, level.stop, device=nodes.device)
        positions = (end[:, None] + (depth - 1)).expand(num_rows, width)
        token_ids = draft.token_ids.gather(1, nodes)
        return LevelPass(
            pairs=head.open(token_ids.flatten(), feature[row, parents].flatten(0, 1), positions.flatten()),
            rows=(row * tree.columns.shape[1] + columns).flatten(),
        )

    def choose(
        self, head: DraftNetwork, tree: TreeTensors, depth: int, logits: Tensor, draft: DraftOutput
    ) -> None:
        """See `DraftOps`."""
        assert draft.children is not None
        draft_ids = best_children(logits, min(draft.children.shape[2], logits.shape[1]))
        place_children(tree, depth, head.target_ids[draft_ids], draft)


def place_children(tree: TreeTensors, depth: int, token_ids: Tensor, draft: DraftOutput) -> None:
    """Note token_ids [B * W, R] int64 as the children of the nodes at `depth`, in rank order, and as the
    tokens of the next level.
    """
    assert draft.children is not None
    nodes, is_node = _known(tree, depth)
    row = torch.arange(nodes.shape[0], device=nodes.device)[:, None]
    chosen = token_ids.view(*nodes.shape, -1)
    count = chosen.shape[2]
    at_root = draft.children[:, :1, :count]
    draft.children[row, nodes, :count] = torch.where(is_node[..., None], chosen, at_root)
    below, is_below = _known(tree, depth + 1)
    parents, ranks = tree.parents.gather(1, below), tree.ranks.gather(1, below)
    drafted = torch.where(is_below, draft.children[row, parents, ranks], draft.token_ids[:, :1])
    draft.token_ids.scatter_(1, below, drafted)


def _known(tree: TreeTensors, depth: int) -> tuple[Tensor, Tensor]:
    """Return the node ids at `depth`, [B, W] int64, and which are nodes; padding is the root, which is no
    node of a level but the first: what is written there is what it holds.
    """
    nodes = tree.level_nodes(depth)
    is_node = nodes < tree.num_nodes
    return torch.where(is_node, nodes, 0), is_node
