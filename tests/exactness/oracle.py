"""Drafters that know the answer, or know how to miss it. Verifying their drafts is the engine's."""

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import compress

import torch

from engine.draft.drafter import DraftNoise, PromptPairs
from engine.speculation import DraftOutput, TreeTensors
from engine.step_rows import AlignWindow
from tests.exactness.tiny import VOCAB

# choose(position, num_children) -> the sibling rank that carries the true token
ChooseRank = Callable[[int, int], int]

FIRST: ChooseRank = lambda position, num_children: 0  # noqa: E731
LAST: ChooseRank = lambda position, num_children: num_children - 1  # noqa: E731
VARYING: ChooseRank = lambda position, num_children: position % num_children  # noqa: E731


class OracleDrafter:
    """Drafts each sequence's known text along one path; siblings off it are wrong.

    A sequence is known by its seed. `texts` maps a seed to the prompt and the tokens that plain decoding
    emits.
    """

    def __init__(self, texts: Mapping[int, tuple[int, ...]], choose_rank: ChooseRank) -> None:
        self.texts = texts
        self.choose_rank = choose_rank
        self.num_filled = 0

    def fill(self, pairs: PromptPairs) -> None:
        self.num_filled += int((pairs.slots > 0).sum())

    def draft(self, window: AlignWindow, tree: TreeTensors, noise: DraftNoise, draft: DraftOutput) -> None:
        rows = zip(
            noise.seed.tolist(),
            window.positions[:, -1].tolist(),
            window.token_ids[:, -1].tolist(),
            strict=True,
        )
        drafted = [self._draft_row(row, tree, *state) for row, state in enumerate(rows)]
        draft.token_ids.copy_(torch.tensor(drafted))

    def _draft_row(self, row: int, tree: TreeTensors, seed: int, root_position: int, root: int) -> list[int]:
        text = self.texts[seed]
        assert root_position >= len(text) or text[root_position] == root, "the root is not the text's"
        parents, ranks = tree.parents[row].tolist(), tree.ranks[row].tolist()
        depths, is_node = tree.depths[row].tolist(), tree.is_node[row].tolist()
        num_children = Counter(compress(parents[1:], is_node[1:]))
        tokens, on_path = [root], {0}
        for node in range(1, tree.num_nodes):
            if not is_node[node]:
                tokens.append(-1)
                continue
            position = root_position + depths[node]
            true = text[position] if position < len(text) else 0
            parent = parents[node]
            is_true = parent in on_path and ranks[node] == self.choose_rank(position, num_children[parent])
            if is_true:
                on_path.add(node)
            tokens.append(true if is_true else (true + 1 + ranks[node]) % VOCAB)
        return tokens


class AdversarialDrafter(OracleDrafter):
    """Drafts anything but the true token, at every node."""

    def __init__(self, texts: Mapping[int, tuple[int, ...]]) -> None:
        super().__init__(texts, lambda position, num_children: -1)
