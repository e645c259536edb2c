"""Masks along a drafted tree equal masks of each path by itself, and the matcher is back where it was."""

import random

import pytest
import torch

from engine.errors import StepError
from engine.grammar.token_mask import TokenBits, forbid, mask_width
from engine.grammar.tree_walk import TreeWalk
from engine.tree.library import TreeLibrary
from engine.tree.topology import TreeTopology
from tests.grammar.automaton import END, AutomatonMatcher, random_table

VOCAB, EOS = 70, 5
LIBRARY = TreeLibrary.search(max_depth=7)
CPU = torch.device("cpu")


def walk(matcher: AutomatonMatcher, topology: TreeTopology, drafts: list[int]) -> dict[int, set[int]]:
    bits = TokenBits(VOCAB, CPU)
    found = TreeWalk(matcher, topology, mask_width(VOCAB))
    masks = {
        node: mask for depth in range(topology.depth + 2) for node, mask in found.level(depth, drafts).items()
    }
    return {
        node: set(bits.unpack(mask[None])[0].nonzero().flatten().tolist()) for node, mask in masks.items()
    }


@pytest.mark.parametrize("tree", ["off", "chain-3", "tree-8", "tree-64"])
@pytest.mark.parametrize("seed", range(8))
def test_each_node_gets_the_mask_of_its_path_and_only_nodes_that_can_be_reached(tree, seed):
    rng = random.Random(seed)
    table = random_table(seed, VOCAB, EOS)
    topology = LIBRARY.get(tree)
    legal = [token for state in table for token in state]
    drafts = [0] + [rng.choice(legal) if rng.random() < 0.9 else -1 for _ in range(topology.num_nodes - 1)]
    matcher = AutomatonMatcher(table)
    matcher.advance(next(iter(table[0])))
    start = list(matcher.states)
    masks = walk(matcher, topology, drafts)
    assert matcher.states == start
    for node in range(topology.num_nodes):
        path, above = [], node
        while above:
            path.append(drafts[above])
            above = topology.parents[above]
        state = start[-1]
        for token in reversed(path):
            state = table[state].get(token) if state not in (None, END) else None
        if state in (None, END):
            assert node not in masks
        else:
            assert masks[node] == set(table[state])


def test_nothing_is_masked_behind_the_end():
    matcher = AutomatonMatcher([{EOS: END}])
    assert walk(matcher, LIBRARY.get("chain-3"), [0, EOS, 9, 9]) == {0: {EOS}}
    matcher.advance(EOS)
    assert walk(matcher, LIBRARY.get("chain-3"), [0, EOS, 9, 9]) == {}


def test_a_dead_end_is_noted_where_it_can_be_reached():
    found = TreeWalk(AutomatonMatcher([{7: 1, 8: 0}, {}]), LIBRARY.get("chain-1"), mask_width(VOCAB))
    found.level(0, [0, 7])
    assert not found.has_dead_end
    found.level(1, [0, 7])
    assert found.has_dead_end


class _Refuses(AutomatonMatcher):
    def advance(self, token_id):
        return len(self.states) < 2 and super().advance(token_id)


def test_a_matcher_that_refuses_what_it_allowed_is_an_error_and_is_rolled_back():
    matcher = _Refuses([{7: 0}])
    found = TreeWalk(matcher, LIBRARY.get("chain-2"), mask_width(VOCAB))
    found.level(0, [0, 7, 7])
    found.level(1, [0, 7, 7])
    with pytest.raises(StepError, match="refuses token 7"):
        found.level(2, [0, 7, 7])
    assert matcher.states == [0]


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 70, 258])
def test_unpacked_bits_are_those_of_the_words(vocab_size):
    words = torch.randint(-(2**31), 2**31, (5, mask_width(vocab_size)), dtype=torch.int32)
    expected = [
        [bool(int(row[token // 32]) >> token % 32 & 1) for token in range(vocab_size)] for row in words
    ]
    assert TokenBits(vocab_size, CPU).unpack(words).tolist() == expected


def test_only_named_rows_are_written():
    logits = torch.randn(4, 6)
    before = logits.clone()
    is_allowed = torch.tensor([[True, False] * 3, [False, True] * 3])
    forbid(logits, torch.tensor([3, 1]), is_allowed)
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    for row, allowed in ((3, is_allowed[0]), (1, is_allowed[1])):
        assert torch.equal(logits[row][allowed], before[row][allowed])
        assert (logits[row][~allowed] == -torch.inf).all()
