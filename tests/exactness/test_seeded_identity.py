"""Tree decoding of a toy model emits token for token what plain decoding emits with the same seed."""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine.sampling.verify import verify
from engine.speculation import DraftOutput, SamplingTensors, TreeTensors
from engine.tree.topology import TreeTopology, chain, root_only
from tests.sampling.cases import sampling_tensors

VOCAB = 19
NUM_CONTEXTS = 997
PROMPTS = ((3, 1, 4), (1, 5), (9, 2, 6, 5), (3, 5, 8), (9,), (7, 9, 3, 2))
TREES = (
    root_only(),
    chain(1),
    chain(4),
    TreeTopology("star", (-1, 0, 0, 0, 0, 0)),
    TreeTopology("uneven", (-1, 0, 0, 0, 1, 1, 2, 4, 4, 6, 7)),
    TreeTopology("full", (-1, *sorted(i // 3 for i in range(63)))),
)
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "truncated": {"temperature": 1.1, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    "penalised": {
        "temperature": 0.8,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    },
    "greedy penalised": {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.5},
    "stops and bias": {
        "temperature": 0.9,
        "top_p": 0.95,
        "bias": ((2, 3.0), (5, -4.0)),
        "stop_token_ids": (2, 11),
        "stop_from": 14,
    },
    "mixed": {"temperature": [0.0, 1.0, 0.5, 0.0, 2.0, 0.7], "top_p": [0.9, 0.9, 1.0, 1.0, 0.5, 0.8]},
}


@dataclass(frozen=True)
class ToyModel:
    """A target whose logits are a table looked up by a hash of the last three tokens."""

    table: Tensor

    def logits(self, tokens: list[int]) -> Tensor:
        context = 0
        for token in tokens[-3:]:
            context = context * 31 + token + 1
        return self.table[context % NUM_CONTEXTS]


MODEL = ToyModel(torch.randn(NUM_CONTEXTS, VOCAB, generator=torch.Generator().manual_seed(0)) * 2)


def draft_row(tokens: list[int], topology: TreeTopology, rng: random.Random) -> tuple[list[int], Tensor]:
    """Return tokens of the nodes, often the target's favourites, and the target's logits at the nodes."""
    texts, drafts, logits = [tokens], [tokens[-1]], [MODEL.logits(tokens)]
    for node in range(1, topology.num_nodes):
        parent, rank = topology.parents[node], topology.ranks[node]
        favourites = logits[parent].argsort(descending=True)
        token = int(favourites[rank]) if rng.random() < 0.8 else rng.randrange(VOCAB)
        drafts.append(token)
        texts.append([*texts[parent], token])
        logits.append(MODEL.logits(texts[node]))
    return drafts, torch.stack(logits)


def decode(trees: list[TreeTopology], fields: dict, num_tokens: int) -> tuple[list[list[int]], int]:
    """Decode every prompt, with the trees taking turns; return the outputs and the steps taken."""
    rng = random.Random(1)
    texts = [list(prompt) for prompt in PROMPTS]
    prompt_mask = torch.zeros(len(PROMPTS), VOCAB, dtype=torch.bool)
    for row, prompt in enumerate(PROMPTS):
        prompt_mask[row, list(prompt)] = True
    sampling = sampling_tensors(len(PROMPTS), VOCAB, **{"seed": torch.arange(len(PROMPTS)), **fields})
    if sampling.is_penalized:
        sampling.prompt_mask.copy_(prompt_mask)
    num_steps = 0
    while min(len(t) - len(p) for t, p in zip(texts, PROMPTS, strict=True)) < num_tokens:
        step(texts, [trees[(row + num_steps) % len(trees)] for row in range(len(PROMPTS))], sampling, rng)
        num_steps += 1
    return [t[len(p) :][:num_tokens] for t, p in zip(texts, PROMPTS, strict=True)], num_steps


def step(
    texts: list[list[int]], trees: list[TreeTopology], sampling: SamplingTensors, rng: random.Random
) -> None:
    """Extend every text by one verified step."""
    num_nodes = max(tree.num_nodes for tree in trees)
    token_ids = torch.full((len(texts), num_nodes), -1)
    logits = torch.full((len(texts), num_nodes, VOCAB), torch.nan)
    for row, (text, topology) in enumerate(zip(texts, trees, strict=True)):
        drafts, row_logits = draft_row(text, topology, rng)
        token_ids[row, : topology.num_nodes] = torch.tensor(drafts)
        logits[row, : topology.num_nodes] = row_logits
    tree = TreeTensors.build(tuple(trees), num_nodes, torch.device("cpu"))
    root_positions = torch.tensor([len(text) - 1 for text in texts])
    answer = verify(logits, DraftOutput(token_ids), tree, sampling, root_positions)
    for row, text in enumerate(texts):
        emitted = [token for token in answer.token_ids[row].tolist() if token >= 0]
        assert len(emitted) == int(answer.num_accepted[row]) + 1
        text.extend(emitted)
        if sampling.is_penalized:
            sampling.output_counts[row] += torch.bincount(torch.tensor(emitted), minlength=VOCAB).int()


@pytest.mark.parametrize("name", list(SAMPLING))
def test_every_tree_emits_the_tokens_of_plain_decoding(name: str) -> None:
    num_tokens = 30
    fields = SAMPLING[name]
    expected, plain_steps = decode([root_only()], fields, num_tokens)
    assert plain_steps == num_tokens
    for topology in TREES:
        outputs, num_steps = decode([topology], fields, num_tokens)
        assert outputs == expected, topology.name
        assert num_steps < num_tokens or topology.depth == 0
    outputs, _ = decode(list(TREES), fields, num_tokens)
    assert outputs == expected
    other, _ = decode([root_only()], {**fields, "seed": 77}, num_tokens)
    assert (other == expected) == name.startswith("greedy")
