"""Acceptance replayed from a profile, for networks whose weights are random.

Every part of a step runs as it always does, verification too: it only reads logits in which the drafts of a
drawn path stand out. Where profiles come from is left to `tree/profile`.
"""

import torch
from torch import Tensor

from engine.sampling.noise import Stream, uniform
from engine.sampling.verify import Verify, verify
from engine.speculation import DraftOutput, SamplingTensors, TreeTensors, Verification
from engine.tree.search import Profile
from engine.tree.topology import MAX_NODES

RAISED = 1e4  # a logit far above all others, also in float16


class ReplayedVerify:
    """Draws a path for each row from a profile, raises the logits of its drafts in place, and verifies.

    So all but the outcome of the comparisons is real: every node of the path is warped and drawn, and the
    token after it is the target's own. What was found feeds a checksum.
    """

    def __init__(self, profile: Profile, device: torch.device, inner: Verify = verify) -> None:
        self._inner = inner
        self._edges = edge_table(profile).to(device)
        self._checksum = torch.zeros((), dtype=torch.int64, device=device)
        # As torch operations it would be most of the launches of a step.
        self._raise_path = raise_path_on_cuda if device.type == "cuda" else raise_path

    def __call__(
        self,
        logits: Tensor,
        draft: DraftOutput,
        tree: TreeTensors,
        sampling: SamplingTensors,
        root_positions: Tensor,
    ) -> Verification:
        """Answer as `verify` does. The path is a function of a row's seed and position; a path may go on by
        chance where its own end happens to be drafted right.
        """
        if tree.depth:
            self._raise_path(logits, draft, tree, self._edges, sampling.seed, root_positions)
        found = self._inner(logits, draft, tree, sampling, root_positions)
        self._checksum.add_(found.token_ids.sum())
        return found

    def checksum(self) -> int:
        """Return the sum of everything that was emitted so far; waits for the device."""
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


def draw_path(
    tree: TreeTensors, edges: Tensor, seed: Tensor, root_positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the path [B, D + 1] to a drawn node, the last one repeated, and its number of drafts [B].

    A node ends the path with the probability that it is accepted and none of its children is; a uniform
    number keyed by seed and position, both [B] int64, is laid against the running sum of these over nodes.
    """
    is_above = tree.ancestor_mask
    accepted = edges[tree.depths, tree.ranks] * tree.is_node
    accepted = torch.where(is_above, accepted[:, None], 1.0).prod(-1)
    ends = accepted.scatter_add(1, tree.parents[:, 1:], -accepted[:, 1:])
    noise = uniform(seed, root_positions, 1, Stream.REPLAY)
    node = (ends.cumsum(1) <= noise).sum(1, keepdim=True)
    # Rounding may leave the running sum under a noise near 1: that draw ends at the root.
    node = node.masked_fill(node == tree.num_nodes, 0)
    num_accepted = tree.depths.gather(1, node)
    step = torch.arange(tree.depth + 1, device=node.device)
    is_on_path = is_above.gather(1, node[..., None].expand(-1, 1, tree.num_nodes))
    is_at_step = tree.depths[:, None] == torch.minimum(step, num_accepted)[..., None]
    return (is_on_path & is_at_step).int().argmax(-1), num_accepted[:, 0]


def raise_path(
    logits: Tensor,
    draft: DraftOutput,
    tree: TreeTensors,
    edges: Tensor,
    seed: Tensor,
    root_positions: Tensor,
) -> None:
    """Let the target say at every node of a drawn path, but the last, what was drafted after it.

    logits: [B, N, V], written in place.
    """
    path, num_accepted = draw_path(tree, edges, seed, root_positions)
    is_kept = torch.arange(tree.depth, device=path.device) < num_accepted[:, None]
    rows = torch.arange(path.shape[0], device=path.device)[:, None].expand_as(is_kept)
    drafted = draft.token_ids.gather(1, path[:, 1:]).clamp(min=0)
    place = (rows, path[:, :-1], drafted)
    logits[place] = torch.where(is_kept, RAISED, logits[place])


def raise_path_on_cuda(
    logits: Tensor,
    draft: DraftOutput,
    tree: TreeTensors,
    edges: Tensor,
    seed: Tensor,
    root_positions: Tensor,
) -> None:
    """Do what `raise_path` does in one launch."""
    from engine.kernels.replay import raise_rows

    nodes = (tree.parents, tree.depths, tree.ranks, tree.ancestor_bits, tree.is_node)
    stream = int(Stream.REPLAY)
    raise_rows(logits, draft.token_ids, nodes, edges, seed, root_positions, tree.depth, stream, RAISED)
