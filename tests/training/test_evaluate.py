import itertools

import pytest
import torch

from engine.training.evaluate import (
    OUTSIDE,
    AcceptanceProfile,
    count_calls,
    measure_ranks,
    tokens_per_call,
)
from engine.tree.topology import TreeTopology, chain, root_only
from tests.training.cases import conversations, tiny_head, tiny_target
from tests.training.oracle import StepwiseDraft, target_outputs

TREE = TreeTopology("tree-9", (-1, 0, 0, 0, 1, 1, 2, 4, 7))
DEPTH = 4


def decode_with_tree(target, head, ids, num_prompt, topology):
    """Return the target calls that speculation with `topology` needs to emit ids[num_prompt:]."""
    draft = StepwiseDraft(head, target_outputs(target, ids)[0])
    for token in ids[: num_prompt - 1]:
        draft.commit(token)
    position, num_calls = num_prompt - 1, 0
    while position < len(ids) - 1:
        state = draft.commit(ids[position])
        path = []
        node = 0
        while topology.children[node] and position + len(path) + 1 < len(ids):
            hidden = draft.draft(path, state)[-1]
            ranked = head.target_ids[head.logits(hidden).argsort(descending=True)].tolist()
            wanted = ids[position + len(path) + 1]
            best = ranked[: len(topology.children[node])]
            if wanted not in best:
                break
            node = topology.children[node][best.index(wanted)]
            path.append(wanted)
        num_calls += 1
        for token in path:
            draft.commit(token)
        position += len(path) + 1
    return num_calls


@pytest.mark.parametrize("topology", [root_only(), chain(1), chain(3), TREE], ids=lambda tree: tree.name)
@torch.no_grad()
def test_simulated_calls_equal_those_of_stepwise_speculation(topology):
    target = tiny_target()
    head = tiny_head(target)
    data = conversations([13, 20, 8])
    _bend_towards_the_head(target, head, data)
    answers = measure_ranks(target, head, data, DEPTH, batch_tokens=21)
    calls = [
        decode_with_tree(target, head, ids.tolist(), int(is_answer.int().argmax()), topology)
        for ids, is_answer in data
    ]
    assert [count_calls(ranks.tolist(), topology) for ranks in answers] == calls
    if topology.num_drafts:
        assert sum(calls) < sum(len(ranks) for ranks in answers)


def _bend_towards_the_head(target, head, data):
    """Replace two of three answer tokens with the head's own best, so that paths are accepted at all."""
    starts = data.starts.tolist()
    for idx, (token_ids, is_answer) in enumerate(data):
        for place in range(int(is_answer.int().argmax()), len(token_ids)):
            if place % 3:
                ids = token_ids[:place].tolist()
                draft = StepwiseDraft(head, target_outputs(target, ids)[0])
                for token in ids:
                    _, hidden = draft.commit(token)
                data.token_ids[starts[idx] + place] = head.target_ids[head.logits(hidden).argmax()]


@torch.no_grad()
def test_a_token_outside_the_draft_vocabulary_has_no_rank():
    target = tiny_target()
    head = tiny_head(target)
    data = conversations([12])
    data.token_ids[9] = 5
    (ranks,) = measure_ranks(target, head, data, 2)
    assert ranks.shape == (6, 2)
    assert ranks[3, 0] == OUTSIDE
    assert ranks[2, 1] == OUTSIDE
    assert ranks[5, 1] == OUTSIDE  # past the end


def test_answers_of_one_conversation_are_separate_runs():
    target = tiny_target()
    data = conversations([12])
    data.is_answer[:] = torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 1, 0], dtype=torch.bool)
    answers = measure_ranks(target, tiny_head(target), data, 3)
    assert [len(ranks) for ranks in answers] == [3, 2, 1]
    assert (answers[1][0, 2], answers[2][0, 1]) == (OUTSIDE, OUTSIDE)


def ranked(rows):
    return torch.tensor(rows)


def test_tokens_per_call_counts_the_path_and_one_token_more():
    answer = ranked([[0, 0], [0, 1], [OUTSIDE, 0], [1, 0], [0, OUTSIDE]])
    assert tokens_per_call([answer], root_only()) == 1.0
    # Calls at tokens 0 (accepts two) and 3 (rank 1 is no child), then 4 (accepts the last).
    assert tokens_per_call([answer], chain(2)) == pytest.approx(5 / 3)
    # With two children at the root, the call at 3 accepts its token, and the bonus is the last.
    assert tokens_per_call([answer], TreeTopology("tree-4", (-1, 0, 0, 1))) == pytest.approx(5 / 2)


def test_a_tree_that_holds_another_never_accepts_less():
    generator = torch.Generator().manual_seed(0)
    answers = [torch.randint(0, 4, (50, 4), generator=generator) for _ in range(5)]
    trees = (root_only(), chain(1), chain(3), TREE)  # each holds the one before
    values = [tokens_per_call(answers, tree) for tree in trees]
    assert values == sorted(values)
    assert all(1.0 <= value <= tree.depth + 1 for value, tree in zip(values, trees, strict=True))


def test_the_profile_counts_ranks_of_paths_that_are_still_alive():
    answers = [ranked([[0, 1], [5, 0], [1, OUTSIDE]]), ranked([[0, OUTSIDE]])]
    profile = AcceptanceProfile.measure(answers, num_ranks=2)
    # Depth 1: four roots with ranks 0, 5, 1, 0. Depth 2: of the roots alive, only the first has a token left.
    assert profile.totals == (4, 1)
    assert profile.counts == ((2, 1), (0, 1))
    assert profile.probabilities == ((0.5, 0.25), (1.0, 0.0))


def test_profile_shares_never_exceed_their_depth():
    generator = torch.Generator().manual_seed(1)
    answers = [torch.randint(0, 6, (40, 3), generator=generator)]
    profile = AcceptanceProfile.measure(answers, num_ranks=4)
    for row in profile.probabilities:
        assert sum(row) <= 1.0
        assert all(left >= right for left, right in itertools.pairwise(row))
