"""Walks one answer's grammar along the tree drafted for it: a mask for every node that can be reached.

Reading drafts from the device and applying masks is left to the runner.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.errors import StepError
from engine.grammar.matcher import Matcher
from engine.tree.topology import TreeTopology


class TreeWalk:
    """A matcher at the root of `topology`, which it is back at after every call.

    Only nodes whose token the node above allows are walked to: the others are never accepted, so they need no
    mask. Neither does a node behind the end of the text.
    """

    def __init__(self, matcher: Matcher, topology: TreeTopology, num_words: int) -> None:
        self._matcher, self._topology, self._num_words = matcher, topology, num_words
        self._masks: dict[int, Tensor] = {}
        self._paths: dict[int, tuple[int, ...]] = {}
        self.has_dead_end = False

    def level(self, depth: int, token_ids: Sequence[int]) -> dict[int, Tensor]:
        """Return the masks [W] of the nodes at `depth` by their ids; levels are asked for in turn.

        token_ids: [N], of which those down to `depth` are read.
        """
        level = self._topology.levels[depth] if depth <= self._topology.depth else ()
        return {node: mask for node in level if (mask := self._walk_to(node, token_ids)) is not None}

    def _walk_to(self, node: int, token_ids: Sequence[int]) -> Tensor | None:
        """Return the mask of one node, None where it needs none."""
        path: tuple[int, ...] = ()
        if node:
            parent, token_id = self._topology.parents[node], token_ids[node]
            if parent not in self._masks or not _has_bit(self._masks[parent], token_id):
                return None
            path = (*self._paths[parent], token_id)
        mask = self._mask_behind(path)
        if mask is not None:
            self._paths[node], self._masks[node] = path, mask
        return mask

    def _mask_behind(self, path: tuple[int, ...]) -> Tensor | None:
        num_taken = 0
        try:
            for token_id in path:
                if not self._matcher.advance(token_id):
                    raise StepError(f"the grammar refuses token {token_id} after allowing it")
                num_taken += 1
            if self._matcher.is_finished:
                return None
            mask = torch.zeros(self._num_words, dtype=torch.int32)
            self._matcher.fill(mask)
        finally:
            if num_taken:
                self._matcher.rollback(num_taken)
        self.has_dead_end |= not mask.any()
        return mask


def _has_bit(mask: Tensor, token_id: int) -> bool:
    return token_id >= 0 and bool(int(mask[token_id // 32]) >> token_id % 32 & 1)
