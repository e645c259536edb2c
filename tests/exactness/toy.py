"""A toy target and draft whose probabilities are known, and the exact law of every event of a step on them.

Verifying is the engine's; counting events is left to the test.
"""

from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from functools import cache
from typing import Self

import torch
from torch import Tensor

from engine.sampling.noise import Stream, gumbel
from engine.sampling.sampler import sample_children
from engine.sampling.verify import verify
from engine.speculation import DraftOutput, TreeTensors, Verification
from engine.tree.topology import TreeTopology
from tests.sampling.cases import sampling_tensors, target_probs

VOCAB = 7
NUM_SIBLINGS = 3
ROOT_POSITION = 11
TREE = TreeTopology("three-three", (-1, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3))
TRUNCATIONS = (
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 2.0},
)
NUM_ROWS_AT_ONCE = 8192
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
# Texts of at most two tokens are numbered as a heap: the text c and one token x more are c * VOCAB + 1 + x.
NUM_TEXTS = 1 + VOCAB + VOCAB**2


@dataclass(frozen=True, slots=True)
class ToyModel:
    """Target and draft logits by text, both [NUM_TEXTS, V] float32.

    The draft is nearly right but for one or two false favourites: where those are drawn first and rejected,
    p and q of the siblings after them are close, so that their acceptance is neither sure nor hopeless.
    """

    target: Tensor
    draft: Tensor

    @classmethod
    def build(cls, seed: int) -> Self:
        generator = torch.Generator().manual_seed(seed)
        shape = (NUM_TEXTS, VOCAB)
        target = 0.8 * torch.randn(shape, generator=generator)
        draft = target + 0.2 * torch.randn(shape, generator=generator)
        num_false = 2 - torch.arange(NUM_TEXTS)[:, None] % 2
        return cls(target, draft + 2.0 * (torch.rand(shape, generator=generator).argsort(1) < num_false))


MODEL = ToyModel.build(6)


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafted trees: the tokens and the texts of their nodes, both [B, N] int64."""

    token_ids: Tensor
    texts: Tensor

    def rows(self, start: int, end: int) -> Self:
        return replace(self, token_ids=self.token_ids[start:end], texts=self.texts[start:end])


def draft_trees(mode: str, num_rows: int) -> Drafts:
    """Draft `TREE` in every row, row b with seed b; mode says how a node's children come about: the draft's
    "best", "drawn" from it without replacement, drawn one by one and perhaps "repeated", or drawn with the
    "target's noise".
    """
    parts = [_draft_part(mode, start) for start in range(0, num_rows, NUM_ROWS_AT_ONCE)]
    token_ids, texts = (torch.cat([getattr(p, name) for p in parts]) for name in ("token_ids", "texts"))
    return Drafts(token_ids[:num_rows], texts[:num_rows])


@cache
def _draft_part(mode: str, start: int) -> Drafts:
    """Return the rows from `start` on that are drafted, and verified, at once."""
    seed = start + torch.arange(NUM_ROWS_AT_ONCE)
    token_ids, texts = torch.full((2, len(seed), TREE.num_nodes), -1)
    texts[:, 0] = 0
    for node, children in enumerate(TREE.children):
        if children:
            log_q = MODEL.draft[texts[:, node]]
            found = _draft_children(mode, log_q, seed, ROOT_POSITION + TREE.depths[node] + 1)
            token_ids[:, list(children)] = found
            texts[:, list(children)] = texts[:, node, None] * VOCAB + 1 + found
    return Drafts(token_ids, texts)


def _draft_children(mode: str, log_q: Tensor, seed: Tensor, position: int) -> Tensor:
    """Return [B, NUM_SIBLINGS]."""
    positions = torch.full_like(seed, position)
    if mode == "best":
        return log_q.topk(NUM_SIBLINGS).indices
    if mode == "drawn":
        return sample_children(log_q, NUM_SIBLINGS, seed, positions)
    if mode == "target's noise":
        return (gumbel(seed, positions, VOCAB, Stream.TARGET) + log_q).topk(NUM_SIBLINGS).indices
    draws = [sample_children(log_q, 1, seed, positions + 1000 * (r + 1)) for r in range(NUM_SIBLINGS)]
    return torch.cat(draws, 1)


def verify_rows(
    drafts: Drafts, q: Tensor | None, fields: dict[str, Tensor | float], target: Tensor = MODEL.target
) -> Verification:
    """Verify in every row, row b with seed b. `fields` are sampling parameters, for all rows or [B].

    q: the draft's probabilities after each text as the verifier is told, and target: the logits, both
    [NUM_TEXTS, V]. Slices that fit into a processor's cache take half the time of one batch.
    """
    answers = []
    for start in range(0, len(drafts.token_ids), NUM_ROWS_AT_ONCE):
        part = drafts.rows(start, start + NUM_ROWS_AT_ONCE)
        seed = start + torch.arange(len(part.token_ids))
        values = {name: value[seed] if isinstance(value, Tensor) else value for name, value in fields.items()}
        sampling = sampling_tensors(len(seed), VOCAB, **{**NEUTRAL, "seed": seed, **values})
        draft = DraftOutput(part.token_ids, None if q is None else q[part.texts])
        root_positions = torch.full_like(seed, ROOT_POSITION)
        answers.append(verify(target[part.texts], draft, _trees(len(seed)), sampling, root_positions))
    return Verification(
        **{f.name: torch.cat([getattr(a, f.name) for a in answers]) for f in fields_of(Verification)}
    )


@cache
def _trees(num_rows: int) -> TreeTensors:
    tree = TreeTensors.build((TREE,), TREE.num_nodes, torch.device("cpu"))
    names = ("parents", "depths", "ranks", "ancestor_bits", "is_node", "columns")
    return replace(tree, **{name: getattr(tree, name).expand(num_rows, -1) for name in names})


@cache
def target_law(**fields: float) -> Tensor:
    """Return [NUM_TEXTS, V] float64: the law of the token after each text."""
    return target_probs(MODEL.target, **{**NEUTRAL, **fields})


@cache
def node_law(mode: str, has_probs: bool, **fields: float) -> Tensor:
    """Return [1 + V, NUM_SIBLINGS + 1, V] float64 for the node after each text that has children: the
    probability that sibling r is accepted as token y, and last that all are rejected and y is drawn.
    """
    p = target_law(**fields)[: 1 + VOCAB]
    log_q = MODEL.draft[: len(p)].double()
    q = log_q.softmax(-1)
    law = torch.zeros(len(p), NUM_SIBLINGS + 1, VOCAB, dtype=torch.float64)
    if has_probs:
        _add_rounds(law, p, q, q if mode == "repeated" else None, 0, torch.ones(len(p), dtype=torch.float64))
        return law
    # Whatever the token is, it is accepted at the rank that has drafted it.
    if mode == "best":
        best = log_q.topk(NUM_SIBLINGS).indices
        ranks = torch.nn.functional.one_hot(best, VOCAB).double()
    else:
        ranks = _rank_law(q)
    law[:, :NUM_SIBLINGS] = ranks * p[:, None]
    law[:, NUM_SIBLINGS] = (1 - ranks.sum(1)) * p
    return law


def _rank_law(q: Tensor) -> Tensor:
    """Return [G, NUM_SIBLINGS, V]: the law of each of three draws from q [G, V] without replacement."""
    is_other = 1 - torch.eye(VOCAB, dtype=torch.float64)
    pairs = q[:, :, None] * q[:, None] / (1 - q)[:, :, None] * is_other
    left = (1 - q[:, :, None] - q[:, None]).clamp(min=torch.finfo(q.dtype).tiny)
    third = torch.einsum("gxy,gz,xz,yz->gz", pairs / left, q, is_other, is_other)
    return torch.stack((q, pairs.sum(1), third), 1)


def _add_rounds(law: Tensor, p: Tensor, q: Tensor, drawn: Tensor | None, rank: int, weight: Tensor) -> None:
    """Add to `law` every outcome from sibling `rank` on, reached with probability `weight` [G].

    Siblings come from q [G, V], or independently of each other from `drawn` [G, V]: then a token that was
    rejected before may come again, and is passed over.
    """
    if rank == NUM_SIBLINGS:
        law[:, rank] += weight[:, None] * p
        return
    tiny = torch.finfo(q.dtype).tiny
    source = q if drawn is None else drawn
    accepted = torch.where(q > 0, (p / q.clamp(min=tiny)).clamp(max=1), 0)
    law[:, rank] += weight[:, None] * source * accepted
    residual = (p - q).relu()
    residual = residual / residual.sum(-1, keepdim=True).clamp(min=tiny)
    for token in range(VOCAB):
        missed = weight * (source * (1 - accepted) * (q > 0))[:, token]
        if missed.any():
            rest = q.clone()
            rest[:, token] = 0
            rest = rest / rest.sum(-1, keepdim=True)
            _add_rounds(law, residual, rest, drawn, rank + 1, missed)
    repeated = weight * (source * (q == 0)).sum(-1)
    if repeated.any():
        _add_rounds(law, p, q, drawn, rank + 1, repeated)
