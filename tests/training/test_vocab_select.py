import torch

from engine.training.dataset import Conversations
from engine.training.vocab_select import count_tokens, coverage, invert, select_vocab


def test_only_answer_tokens_count():
    data = Conversations(
        torch.tensor([5, 5, 2, 5, 7], dtype=torch.int32),
        torch.tensor([False, True, True, True, True]),
        torch.tensor([2, 3]),
    )
    assert count_tokens(data, 9).tolist() == [0, 0, 1, 0, 0, 2, 0, 1, 0]


def test_the_most_frequent_tokens_are_chosen_in_rising_order():
    counts = torch.tensor([1, 4, 0, 4, 2])
    assert select_vocab(counts, 3).tolist() == [1, 3, 4]
    assert select_vocab(counts, 1).tolist() == [1]


def test_coverage_is_the_share_of_counts():
    counts = torch.tensor([1, 4, 0, 4, 1])
    assert coverage(counts, torch.tensor([1, 3])) == 0.8
    assert coverage(counts, torch.arange(5)) == 1.0


def test_inverting_the_map_finds_every_draft_id():
    target_ids = torch.tensor([1, 4, 6])
    draft_ids = invert(target_ids, 8)
    assert draft_ids[target_ids].tolist() == [0, 1, 2]
    assert (draft_ids == -1).sum() == 5
