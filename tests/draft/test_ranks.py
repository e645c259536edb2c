"""The rank of a drawn token is its place among the draft's best, whatever the tree kept of them."""

import torch

from engine.draft.ranks import ranks_at
from engine.speculation import DraftOutput

CHILDREN = torch.tensor([[[7, 3, 9], [4, 4, 1]], [[-1, -1, -1], [5, 6, 8]], [[2, 0, 1], [-1, -1, -1]]])


def test_a_rank_is_counted_from_the_best_child_and_is_their_number_for_none_of_them():
    draft = DraftOutput(torch.zeros(3, 2, dtype=torch.int64), children=CHILDREN)
    found = ranks_at(draft, torch.tensor([0, 1, 0]), torch.tensor([9, 4, 2]))
    assert found.tolist() == [[2, 3], [3, 3], [0, 3]]


def test_nothing_is_known_where_the_draft_did_not_run_or_drew_its_children():
    token_ids = torch.zeros(3, 2, dtype=torch.int64)
    nodes, tokens = torch.tensor([0, 0, 1]), torch.tensor([3, 2, 2])
    assert ranks_at(DraftOutput(token_ids, children=CHILDREN), nodes, tokens).tolist() == [
        [1, 3],
        [-1, 3],
        [-1, 3],
    ]
    sampled = DraftOutput(token_ids, probs=torch.ones(3, 2, 4), children=CHILDREN)
    for draft in (sampled, DraftOutput(token_ids)):
        assert ranks_at(draft, nodes, tokens).tolist() == [[-1, -1]] * 3
