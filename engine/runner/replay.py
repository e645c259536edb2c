"""Acceptance replayed from a profile, for networks whose weights are random.

Every part of a step runs as it always does, verification too; only which drafts count as accepted is
replaced. Where profiles come from is left to `tree/profile`.
"""

import torch
from torch import Tensor

from engine.sampling.noise import Stream, uniform
from engine.sampling.verify import Verify, verify
from engine.speculation import DraftOutput, SamplingTensors, TreeTensors, Verification
from engine.tree.search import Profile
from engine.tree.topology import MAX_NODES


class ReplayedVerify:
    """Verifies with `inner`, then replaces the accepted path by one drawn from a profile, row by row.

    The draw is a function of the row's seed and position. What `inner` found feeds a checksum.
    """

    def __init__(self, profile: Profile, device: torch.device, inner: Verify = verify) -> None:
        self._inner = inner
        self._edges = edge_table(profile).to(device)
        self._checksum = torch.zeros((), dtype=torch.int64, device=device)
        # As torch operations it would be most of the launches of a step.
        self._replay = replay_on_cuda if device.type == "cuda" else replay

    def __call__(
        self,
        logits: Tensor,
        draft: DraftOutput,
        tree: TreeTensors,
        sampling: SamplingTensors,
        root_positions: Tensor,
    ) -> Verification:
        """Return a verification of a path of `tree` that holds the drafted tokens and, last, the token that
        the target really drew.
        """
        real = self._inner(logits, draft, tree, sampling, root_positions)
        self._checksum.add_(real.token_ids.sum())
        return self._replay(real, draft, tree, self._edges, sampling.seed, root_positions)

    def checksum(self) -> int:
        """Return the sum of everything that the real verifications emitted so far; waits for the device."""
        return int(self._checksum)


def edge_table(profile: Profile) -> Tensor:
    """Return [64, 64] float32: the acceptance of a node by its depth and rank, given that of its parent.

    The root, of depth 0 and rank 0, is accepted always; depths beyond the profile behave as its last row.
    """
    table = torch.zeros(MAX_NODES, MAX_NODES)
    table[0, 0] = 1.0
    for depth in range(1, MAX_NODES):
        row = profile[min(depth, len(profile)) - 1][:MAX_NODES]
        table[depth, : len(row)] = torch.tensor(row)
    return table


def replay(
    real: Verification,
    draft: DraftOutput,
    tree: TreeTensors,
    edges: Tensor,
    seed: Tensor,
    root_positions: Tensor,
) -> Verification:
    """Return `real` with the path from the root to a drawn node, drafted tokens and the real next one.

    A node ends the path with the probability that it is accepted and none of its children is; a uniform
    number keyed by seed and position, both [B] int64, is laid against the running sum of these over nodes.
    """
    noise = uniform(seed, root_positions, 1, Stream.REPLAY)
    is_above = tree.ancestor_mask()
    accepted = edges[tree.depths, tree.ranks] * tree.is_node
    accepted = torch.where(is_above, accepted[:, None], 1.0).prod(-1)
    ends = accepted.scatter_add(1, tree.parents[:, 1:], -accepted[:, 1:])
    node = (ends.cumsum(1) <= noise).sum(1, keepdim=True)
    # Rounding may leave the running sum under a noise near 1: that draw ends at the root.
    node = node.masked_fill(node == tree.num_nodes, 0)
    num_accepted = tree.depths.gather(1, node)
    step = torch.arange(tree.depth + 1, device=node.device)
    is_on_path = is_above.gather(1, node[..., None].expand(-1, 1, tree.num_nodes))
    is_at_step = tree.depths[:, None] == torch.minimum(step, num_accepted)[..., None]
    path = (is_on_path & is_at_step).int().argmax(-1)
    drafted = draft.token_ids.gather(1, path.roll(-1, 1))
    last = torch.where(step == num_accepted, real.next_token[:, None], -1)
    return Verification(
        path=path,
        num_accepted=num_accepted[:, 0],
        next_token=real.next_token,
        token_ids=torch.where(step < num_accepted, drafted, last),
        is_finite=real.is_finite,
    )


def replay_on_cuda(
    real: Verification,
    draft: DraftOutput,
    tree: TreeTensors,
    edges: Tensor,
    seed: Tensor,
    root_positions: Tensor,
) -> Verification:
    """Return what `replay` does, from one launch."""
    from engine.kernels.replay import replay_rows

    nodes = (tree.parents, tree.depths, tree.ranks, tree.ancestor_bits, tree.is_node)
    path, num_accepted, token_ids = replay_rows(
        nodes,
        edges,
        draft.token_ids,
        real.next_token,
        seed,
        root_positions,
        depth=tree.depth,
        stream=int(Stream.REPLAY),
    )
    return Verification(path, num_accepted, real.next_token, token_ids, real.is_finite)
