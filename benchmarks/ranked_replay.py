"""Replayed acceptance that also tells which rank was right where a path ended, as real text does.

Drawing the path is left to `engine/runner/replay`. Without the rank a dispatcher would learn that no token
beyond the children of the tree at hand is ever right.
"""

import torch
from torch import Tensor

from engine.runner.replay import ReplayedVerify, edge_table
from engine.sampling.noise import Stream, uniform
from engine.sampling.verify import Verify
from engine.speculation import DraftOutput, SamplingTensors, TreeTensors, Verification
from engine.tree.search import Profile
from engine.tree.topology import MAX_NODES


class RankedReplay:
    """Verifies as `ReplayedVerify` does, whatever its acceptance is set to.

    The rank of the token after a path is drawn from the profile, given that it is none of the tree's, and
    the draft's child of that rank becomes the token: only the dispatcher reads it.
    """

    def __init__(self, profile: Profile, device: torch.device, inner: Verify) -> None:
        self._replay = ReplayedVerify(profile, device, inner)
        self._below = _below(profile).to(device)

    def set_profile(self, profile: Profile) -> None:
        """Accept by another profile from the next step on, also in steps that were captured."""
        self._replay._edges.copy_(edge_table(profile))  # noqa: SLF001 - a benchmark's own seam
        self._below.copy_(_below(profile))

    def __call__(
        self,
        logits: Tensor,
        draft: DraftOutput,
        tree: TreeTensors,
        sampling: SamplingTensors,
        root_positions: Tensor,
    ) -> Verification:
        """See `Verify`."""
        found = self._replay(logits, draft, tree, sampling, root_positions)
        if tree.depth and draft.children is not None:
            self._tell(found, draft.children, tree, sampling.seed, root_positions)
        return found

    def _tell(
        self, found: Verification, children: Tensor, tree: TreeTensors, seed: Tensor, root_positions: Tensor
    ) -> None:
        """Write the drawn token over the child of a drawn rank, at the end of each path where the draft
        ran.
        """
        row, last = torch.arange(len(seed), device=seed.device), found.path[:, -1]
        is_child = (tree.parents == last[:, None]) & tree.is_node
        num_wrong = is_child[:, 1:].sum(1, keepdim=True)  # the table has the root as its own parent
        below = self._below[found.num_accepted]
        is_passed = below.gather(1, num_wrong)
        noise = uniform(seed, root_positions, 2, Stream.REPLAY)[:, 1:]
        rank = (below[:, 1:] <= is_passed + noise * (1.0 - is_passed)).sum(1)
        is_told = (rank < children.shape[2]) & (children[row, last, 0] >= 0)
        place = row, last, rank.clamp(max=children.shape[2] - 1)
        children[place] = torch.where(is_told, found.next_token, children[place])


def _below(profile: Profile) -> Tensor:
    """Return [64, 65] float32: the chance that the token after a node at that depth has a smaller rank."""
    table = torch.zeros(MAX_NODES, MAX_NODES + 1)
    for depth in range(MAX_NODES):
        row = torch.tensor(profile[min(depth, len(profile) - 1)][:MAX_NODES])
        table[depth, 1 : len(row) + 1] = row.cumsum(0)
        table[depth, len(row) + 1 :] = row.sum()
    return table
