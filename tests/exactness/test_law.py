"""The law of what a verified step emits, on a toy model whose probabilities are known exactly.

Every event of a step (first token, acceptance and rejection at each sibling order, the token after an
acceptance, the bonus token) is counted over many seeds and held against its exact probability by a chi-square
test. Each biased variant of the method must fail the same test.
"""

import dataclasses

import pytest
import torch
from torch import Tensor

from engine.sampling import verify as verify_module
from engine.sampling.noise import Stream, gumbel, uniform
from engine.sampling.sampler import sample_children
from engine.sampling.verify import verify
from engine.speculation import DraftOutput, TreeTensors, Verification
from engine.tree.topology import TreeTopology, chain
from tests.sampling.cases import sampling_tensors, target_probs
from tests.sampling.laws import count_pairs, law_p_value

VOCAB = 7
NUM_SIBLINGS = 3
ROOT_POSITION = 11
TREE = TreeTopology("three-three", (-1, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3))
STAR = TreeTopology("three", (-1, 0, 0, 0))
ACCEPTED, REJECTED = 1e-4, 1e-6


@dataclasses.dataclass(frozen=True)
class ToyModel:
    """Target and draft logits by context: after nothing [V], one token [V, V], two tokens [V, V, V]."""

    target: tuple[Tensor, Tensor, Tensor]
    draft: tuple[Tensor, Tensor, Tensor]

    @staticmethod
    def build(seed: int) -> "ToyModel":
        generator = torch.Generator().manual_seed(seed)
        target = tuple(torch.randn((VOCAB,) * n, generator=generator) * 1.2 for n in (1, 2, 3))
        draft = tuple(0.3 * t + torch.randn(t.shape, generator=generator) for t in target)
        return ToyModel(target, draft)


MODEL = ToyModel.build(4)
TRUNCATIONS = {
    "plain": {},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "all": {"temperature": 0.8, "top_k": 5, "top_p": 0.95, "min_p": 0.05},
    "hot": {"temperature": 2.0},
}


def logits_at_nodes(tables: tuple[Tensor, ...], token_ids: Tensor, topology: TreeTopology) -> Tensor:
    """Return [B, N, V]: the logits after the path of each node."""
    rows = []
    for node, depth in enumerate(topology.depths):
        path = [node, topology.parents[node]][:depth][::-1]
        context = tuple(token_ids[:, ancestor].clamp(min=0) for ancestor in path)
        rows.append(tables[depth][context] if context else tables[0].expand(len(token_ids), -1))
    return torch.stack(rows, 1)


def draft_tree(seed: Tensor, topology: TreeTopology, is_sampled: bool) -> Tensor:
    """Return drafted tokens [B, N]: per node the best children of the draft, or children drawn from it."""
    token_ids = torch.full((len(seed), topology.num_nodes), -1)
    for node, children in enumerate(topology.children):
        if children:
            log_q = logits_at_nodes(MODEL.draft, token_ids, topology)[:, node]
            position = torch.full_like(seed, ROOT_POSITION + topology.depths[node] + 1)
            best = log_q.topk(NUM_SIBLINGS).indices
            token_ids[:, list(children)] = (
                sample_children(log_q, NUM_SIBLINGS, seed, position) if is_sampled else best
            )
    return token_ids


def repeated_tree(topology: TreeTopology, num_rows: int) -> TreeTensors:
    tree = TreeTensors.build((topology,), topology.num_nodes, torch.device("cpu"))
    fields = {
        name: getattr(tree, name)
        for name in ("parents", "depths", "ranks", "ancestor_bits", "is_node", "columns")
    }
    return dataclasses.replace(
        tree,
        **{name: table.expand(num_rows, -1) for name, table in fields.items()},
    )


def run(
    token_ids: Tensor, topology: TreeTopology, has_probs: bool, fields: dict, num_shift: int = 0
) -> Verification:
    """Verify the drafted `token_ids` [B, N] against the toy target, row b with seed b."""
    num_rows = len(token_ids)
    tree = repeated_tree(topology, num_rows)
    probs = None
    if has_probs:
        probs = logits_at_nodes(MODEL.draft, token_ids, topology).softmax(-1).roll(num_shift, 1)
    sampling = sampling_tensors(
        num_rows, VOCAB, **{"temperature": 1.0, "seed": torch.arange(num_rows), **fields}
    )
    logits = logits_at_nodes(MODEL.target, token_ids, topology)
    root_positions = torch.full((num_rows,), ROOT_POSITION)
    return verify(logits, DraftOutput(token_ids, probs), tree, sampling, root_positions)


def node_law(p: Tensor, log_q: Tensor, is_sampled: bool) -> Tensor:
    """Return [(NUM_SIBLINGS + 1) * V]: the probability that sibling r is accepted as token y, and in the last
    row that all are rejected and y is drawn.
    """
    law = torch.zeros(NUM_SIBLINGS + 1, VOCAB, dtype=torch.float64)
    if is_sampled:
        add_rounds(law, p, log_q.double().softmax(-1), 0, 1.0)
        return law.flatten()
    law[NUM_SIBLINGS] = p
    for rank, token in enumerate(log_q.topk(NUM_SIBLINGS).indices.tolist()):
        law[rank, token], law[NUM_SIBLINGS, token] = p[token], 0.0
    return law.flatten()


def add_rounds(law: Tensor, p: Tensor, q: Tensor, rank: int, weight: float) -> None:
    """Add to `law` every outcome from sibling `rank` on, reached with probability `weight`."""
    if rank == NUM_SIBLINGS:
        law[rank] += weight * p
        return
    residual = (p - q).relu()
    for token in range(VOCAB):
        accepted = min(float(p[token]), float(q[token]))
        law[rank, token] += weight * accepted
        if accepted < float(q[token]):
            rest = q.clone()
            rest[token] = 0.0
            missed = weight * (float(q[token]) - accepted)
            add_rounds(law, residual / residual.sum(), rest / rest.sum(), rank + 1, missed)


def event_of(node: Tensor, parent: Tensor, is_open: Tensor, topology: TreeTopology) -> Tensor:
    """Return [B] the rank of the accepted sibling, NUM_SIBLINGS where all were rejected."""
    ranks = torch.tensor(topology.ranks)
    return torch.where(is_open & (node != parent), ranks[node], NUM_SIBLINGS)


@pytest.mark.parametrize("truncation", list(TRUNCATIONS))
@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy drafts", "sampled drafts"])
def test_every_event_of_a_step_has_its_exact_probability(is_sampled: bool, truncation: str) -> None:
    num_rows = 120_000 if truncation == "plain" else 50_000
    fields = {"temperature": 1.0, **TRUNCATIONS[truncation]}
    token_ids = draft_tree(torch.arange(num_rows), TREE, is_sampled)
    answer = run(token_ids, TREE, is_sampled, fields)
    tokens, num_accepted, path = answer.token_ids, answer.num_accepted, answer.path
    assert int((num_accepted + 1).sum()) >= (200_000 if truncation == "plain" else 80_000)
    p = [target_probs(table, **fields) for table in MODEL.target]
    p_values = {}

    def check(name: str, groups: Tensor, cells: Tensor, law: Tensor) -> None:
        p_values[name] = law_p_value(count_pairs(groups, cells, *law.shape), law)

    zeros = torch.zeros_like(num_accepted)
    check("first token", zeros, tokens[:, 0], p[0][None])
    event = event_of(path[:, 1], path[:, 0], num_accepted >= 1, TREE)
    law = node_law(p[0], MODEL.draft[0], is_sampled)[None]
    check("sibling order at the root", zeros, event * VOCAB + tokens[:, 0], law)

    after = num_accepted >= 1
    check("after an acceptance", tokens[after, 0], tokens[after, 1], p[1])
    event = event_of(path[after, 2], path[after, 1], num_accepted[after] >= 2, TREE)
    law = torch.stack([node_law(p[1][x], MODEL.draft[1][x], is_sampled) for x in range(VOCAB)])
    check("sibling order below", tokens[after, 0], event * VOCAB + tokens[after, 1], law)

    bonus = num_accepted == 2
    check("bonus", tokens[bonus, 0] * VOCAB + tokens[bonus, 1], tokens[bonus, 2], p[2].flatten(0, 1))
    assert min(p_values.values()) > ACCEPTED, p_values


def first_token_p_value(answer: Verification, fields: dict) -> float:
    law = target_probs(MODEL.target[0], **{"temperature": 1.0, **fields})[None]
    zeros = torch.zeros_like(answer.num_accepted)
    return law_p_value(count_pairs(zeros, answer.token_ids[:, 0], 1, VOCAB), law)


NUM_CONTROL_ROWS = 100_000


def drawn_star() -> Tensor:
    return draft_tree(torch.arange(NUM_CONTROL_ROWS), STAR, is_sampled=True)


def test_sound_variant_of_the_controls_passes() -> None:
    assert first_token_p_value(run(drawn_star(), STAR, True, {}), {}) > ACCEPTED


def test_sampled_drafts_may_be_matched_as_if_deterministic() -> None:
    assert first_token_p_value(run(drawn_star(), STAR, False, {}), {}) > ACCEPTED


def test_repeated_siblings_keep_the_law() -> None:
    # Independent draws from q may repeat a token: a repetition has no probability left and is passed over.
    seed = torch.arange(NUM_CONTROL_ROWS)
    token_ids = torch.full((NUM_CONTROL_ROWS, STAR.num_nodes), -1)
    for node in range(1, STAR.num_nodes):
        position = torch.full_like(seed, 1000 + node)
        token_ids[:, node] = sample_children(MODEL.draft[0].expand(len(seed), -1), 1, seed, position)[:, 0]
    assert (token_ids[:, 1] == token_ids[:, 2]).any()
    assert first_token_p_value(run(token_ids, STAR, True, {}), {}) > ACCEPTED


def test_control_best_children_scored_as_if_drawn() -> None:
    token_ids = draft_tree(torch.arange(NUM_CONTROL_ROWS), STAR, is_sampled=False)
    assert first_token_p_value(run(token_ids, STAR, True, {}), {}) < REJECTED


def test_control_drawn_children_dropped_by_their_own_confidence() -> None:
    token_ids = drawn_star()
    is_unsure = MODEL.draft[0].softmax(-1)[token_ids] < 0.15
    assert first_token_p_value(run(token_ids.masked_fill(is_unsure, -1), STAR, True, {}), {}) < REJECTED


def test_control_draft_probabilities_of_another_node() -> None:
    assert first_token_p_value(run(drawn_star(), STAR, True, {}, num_shift=1), {}) < REJECTED


def test_control_children_drawn_with_the_noise_of_the_target() -> None:
    seed = torch.arange(NUM_CONTROL_ROWS)
    noise = gumbel(seed, torch.full_like(seed, ROOT_POSITION + 1), VOCAB, Stream.TARGET)
    best = (noise + MODEL.draft[0]).argmax(-1)
    token_ids = torch.stack((torch.zeros_like(best), best), 1)
    assert first_token_p_value(run(token_ids, chain(1), True, {}), {}) < REJECTED


def unnormalised_residual(p: Tensor, q: Tensor, x: Tensor, is_missed: Tensor) -> tuple[Tensor, Tensor]:
    rest = q.scatter(1, x, 0.0)
    rest = rest / rest.sum(-1, keepdim=True)
    return torch.where(is_missed, (p - q).relu(), p), torch.where(is_missed, rest, q)


def unconditioned_draft(p: Tensor, q: Tensor, x: Tensor, is_missed: Tensor) -> tuple[Tensor, Tensor]:
    residual = (p - q).relu()
    return torch.where(is_missed, residual / residual.sum(-1, keepdim=True), p), q


def kept_target(p: Tensor, q: Tensor, x: Tensor, is_missed: Tensor) -> tuple[Tensor, Tensor]:
    rest = q.scatter(1, x, 0.0)
    return p, torch.where(is_missed, rest / rest.sum(-1, keepdim=True), q)


@pytest.mark.parametrize("broken", [unnormalised_residual, unconditioned_draft, kept_target])
def test_control_wrong_residual(broken: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "_residual", broken)
    assert first_token_p_value(run(drawn_star(), STAR, True, {}), {}) < REJECTED


def test_control_one_uniform_for_all_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    def repeated(seed: Tensor, position: Tensor, count: int, stream: Stream) -> Tensor:
        return uniform(seed, position, 1, stream).expand(-1, count)

    monkeypatch.setattr(verify_module, "uniform", repeated)
    assert first_token_p_value(run(drawn_star(), STAR, True, {}), {}) < REJECTED


def test_control_target_verified_before_its_truncation() -> None:
    fields = {"top_p": 0.8}
    assert first_token_p_value(run(drawn_star(), STAR, True, fields), fields) > ACCEPTED
    assert first_token_p_value(run(drawn_star(), STAR, True, {}), fields) < REJECTED
