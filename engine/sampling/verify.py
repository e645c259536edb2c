"""Decides which drafted path the target keeps and draws the token after it: multi-round speculative sampling.

Whatever was drafted, the law of what is emitted is the target's (arXiv 2305.09781). Moving the accepted rows
into the cache is left to the runner.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.sampling.noise import Stream, uniform
from engine.sampling.sampler import draw
from engine.sampling.warp import warp
from engine.speculation import DraftOutput, SamplingTensors, TreeTensors, Verification


@dataclass(frozen=True, slots=True)
class _Siblings:
    """The children of one node per row, among W nodes of a level: nodes, token_ids, ranks: [B, W] int64.

    Where an entry is no child of the node, `nodes` is N and the rest means nothing.
    """

    nodes: Tensor
    token_ids: Tensor
    ranks: Tensor


class Verify(Protocol):
    """The signature of `verify`, for implementations of one device."""

    def __call__(
        self,
        logits: Tensor,
        draft: DraftOutput,
        tree: TreeTensors,
        sampling: SamplingTensors,
        root_positions: Tensor,
    ) -> Verification: ...


def verify(
    logits: Tensor,
    draft: DraftOutput,
    tree: TreeTensors,
    sampling: SamplingTensors,
    root_positions: Tensor,
) -> Verification:
    """Walk from the root along the accepted path, one [B, V] draw per level, and return what is emitted.

    logits: [B, N, V] of any float dtype, the target's at each node; root_positions: [B] int64. The token
    drawn at a node of depth d sits at root position + d + 1: its noise and its minimum length are keyed so,
    and its penalties count the path above it. Deterministic children (`draft.probs` None): the emitted tokens
    are those of plain decoding with the same seed, for any tree. Sampled children: their law is. Never reads
    a device value on the host.
    """
    rows = torch.arange(tree.num_rows, device=logits.device)
    node = torch.zeros_like(root_positions)
    is_open = torch.ones_like(root_positions, dtype=torch.bool)
    output_counts = sampling.output_counts.clone()
    path, tokens, peaks, opens = [node], [], [], [is_open]
    for depth in range(tree.depth + 1):
        position = root_positions + (depth + 1)
        masked = warp(logits[rows, node], sampling, output_counts, position)
        siblings = _siblings(draft.token_ids, tree, node, depth)
        if draft.probs is None:
            token = draw(masked, sampling, position)
            child = _matching_child(token, siblings, tree)
        else:
            token, child = _sampled_child(masked, draft.probs[rows, node], siblings, tree, sampling, position)
        is_open = is_open & (child < tree.num_nodes)
        node = torch.where(is_open, child, node)
        if sampling.is_penalized:
            output_counts.scatter_add_(1, token[:, None], is_open[:, None].int())
        path.append(node)
        tokens.append(token)
        peaks.append(masked.amax(-1))
        opens.append(is_open)
    # Nothing is below the deepest level, so the last entries of `path` and `opens` say nothing new.
    levels = (torch.stack(levels, 1) for levels in (path[:-1], tokens, peaks, opens[:-1]))
    return _verification(*levels)


def _siblings(token_ids: Tensor, tree: TreeTensors, node: Tensor, depth: int) -> _Siblings:
    """Return the children of `node` [B], which is at `depth`; below the deepest level there is one entry that
    is none.
    """
    num_nodes = tree.num_nodes
    level = tree.level_nodes(depth + 1) if depth < tree.depth else torch.full_like(node[:, None], num_nodes)
    legal = level.clamp(max=num_nodes - 1)
    is_child = tree.parents.gather(1, legal) == node[:, None]
    return _Siblings(
        nodes=level.masked_fill(~is_child, num_nodes),
        token_ids=token_ids.gather(1, legal),
        ranks=tree.ranks.gather(1, legal),
    )


def _matching_child(token: Tensor, siblings: _Siblings, tree: TreeTensors) -> Tensor:
    """Return [B] the first of the siblings that holds `token` [B], or N."""
    is_match = siblings.token_ids == token[:, None]
    return siblings.nodes.masked_fill(~is_match, tree.num_nodes).amin(1)


def _sampled_child(
    masked: Tensor,
    q: Tensor,
    siblings: _Siblings,
    tree: TreeTensors,
    sampling: SamplingTensors,
    position: Tensor,
) -> tuple[Tensor, Tensor]:
    """Test siblings drawn from q [B, V] without replacement; return [B] the emitted token and [B] the child,
    or N.

    Each round accepts x with probability min(1, p(x) / q(x)); a rejection leaves p = norm(relu(p - q)) and
    q without x, renormalised: the law of the next sibling. After all rounds the token is drawn from p.
    """
    p = _target_probs(masked, sampling.temperature)
    accepted = torch.full_like(position, tree.num_nodes)
    accepted_token = torch.zeros_like(position)
    is_rejected = torch.zeros_like(sampling.temperature, dtype=torch.bool)
    num_rounds = min(tree.max_rank + 1, siblings.nodes.shape[1])
    uniforms = uniform(sampling.seed, position, num_rounds, Stream.ACCEPT)
    for rank in range(num_rounds):
        child, idx = siblings.nodes.masked_fill(siblings.ranks != rank, tree.num_nodes).min(1, keepdim=True)
        drafted = siblings.token_ids.gather(1, idx)
        x = drafted.clamp(min=0)
        p_x, q_x = p.gather(1, x)[:, 0], q.gather(1, x)[:, 0]
        # A token without probability was not drawn from q: it is padding, or repeats a sibling tested before.
        is_drafted = (child < tree.num_nodes) & (drafted >= 0)
        is_tested = (accepted == tree.num_nodes) & is_drafted[:, 0] & (q_x > 0)
        # Strict, since u may be 0 and a token with p(x) = 0 must never pass.
        is_under = uniforms[:, rank] * q_x < p_x
        accepted = torch.where(is_tested & is_under, child[:, 0], accepted)
        accepted_token = torch.where(is_tested & is_under, x[:, 0], accepted_token)
        p, q = _residual(p, q, x, (is_tested & ~is_under)[:, None])
        is_rejected |= is_tested & ~is_under
    # Without a rejection the draw reads the logits themselves, so that it equals plain decoding to the bit.
    is_residual = is_rejected & (sampling.temperature > 0)
    residual = torch.where(is_residual[:, None], p.log() * sampling.temperature[:, None], masked)
    token = draw(residual, sampling, position)
    return torch.where(accepted < tree.num_nodes, accepted_token, token), accepted


def _target_probs(masked: Tensor, temperature: Tensor) -> Tensor:
    """Return softmax(masked / temperature) [B, V], all on the argmax where the temperature [B] is 0."""
    is_greedy = (temperature == 0)[:, None]
    probs = (masked / temperature[:, None].masked_fill(is_greedy, 1.0)).softmax(-1)
    one_hot = torch.zeros_like(probs).scatter_(1, masked.argmax(-1, keepdim=True), 1.0)
    return torch.where(is_greedy, one_hot, probs)


def _residual(p: Tensor, q: Tensor, x: Tensor, is_missed: Tensor) -> tuple[Tensor, Tensor]:
    """Return p and q [B, V] after x [B, 1] was rejected, in rows where `is_missed` [B, 1]."""
    residual = (p - q).relu()
    total = residual.sum(-1, keepdim=True)
    # p == q rejects with probability 0, but rounding can bring a row here with an empty residual: keep its p.
    p = torch.where(is_missed & (total > 0), residual / total, p)
    rest = q.scatter(1, x, 0.0)
    rest /= rest.sum(-1, keepdim=True).clamp(min=torch.finfo(rest.dtype).tiny)
    return p, torch.where(is_missed, rest, q)


def _verification(path: Tensor, tokens: Tensor, peaks: Tensor, is_open: Tensor) -> Verification:
    """Build the answer from what each level gave, all [B, D + 1]: its node, its token, its largest logit, and
    whether the path reached it.

    A row that met a level without a finite largest logit accepts nothing and emits token 0, a valid id.
    """
    # A stopped row reads its last node again, so levels it did not reach repeat the finding.
    is_finite = peaks.isfinite().all(1)
    is_reached = is_open & is_finite[:, None]
    is_reached[:, 0].fill_(True)
    num_accepted = is_reached.sum(1) - 1
    token_ids = tokens.masked_fill(~is_finite[:, None], 0).masked_fill_(~is_reached, -1)
    return Verification(
        path=path.masked_fill(~is_finite[:, None], 0),
        num_accepted=num_accepted,
        next_token=token_ids.gather(1, num_accepted[:, None])[:, 0],
        token_ids=token_ids,
        is_finite=is_finite,
    )
