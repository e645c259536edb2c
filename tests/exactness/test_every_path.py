"""Every leaf of every tree of the library is accepted whole when its path is the true text."""

import pytest

from engine.tree.library import TreeLibrary
from engine.tree.topology import TreeTopology
from tests.exactness.oracle import OracleDrafter
from tests.exactness.tiny import VOCAB, EngineShape, build_engine, build_target, prompts, request_of, run

TARGET = build_target()
LIBRARY = TreeLibrary.search(max_depth=15)
NAMES = ("chain-1", "chain-7", "chain-15", "tree-8", "tree-16", "tree-32", "tree-64")
SAMPLINGS = {"greedy": {}, "seeded": {"temperature": 0.8, "top_p": 0.9}}


def leaf_paths(topology: TreeTopology) -> list[tuple[int, ...]]:
    """Return the nodes from below the root to each leaf."""
    paths = []
    for node in range(1, topology.num_nodes):
        if not topology.children[node]:
            path = [node]
            while topology.parents[path[0]]:
                path.insert(0, topology.parents[path[0]])
            paths.append(tuple(path))
    return paths


class PathDrafter(OracleDrafter):
    """Puts the true text along one leaf's path, the next leaf's at every call; the rest is wrong."""

    def __init__(self, texts, topology: TreeTopology) -> None:
        super().__init__(texts, lambda position, num_children: 0)
        self.topology, self.paths = topology, leaf_paths(topology)
        self.num_drafted: dict[int, int] = {}
        self.drafted: dict[int, list[int]] = {seed: [] for seed in texts}

    def _draft_row(self, row, tree, seed, root_position, root):
        text = self.texts[seed]
        count = self.num_drafted.get(seed, 0)
        self.num_drafted[seed] = count + 1
        # Rows start at different leaves, so that a batch mixes them.
        path = self.paths[(count + seed) % len(self.paths)]
        assert root_position >= len(text) or text[root_position] == root
        tokens = [root]
        for node in range(1, self.topology.num_nodes):
            position = root_position + self.topology.depths[node]
            true = text[position] if position < len(text) else 0
            tokens.append(true if node in path else (true + 1 + node) % VOCAB)
        self.drafted[seed].append(len(path))
        return tokens + [-1] * (tree.num_nodes - len(tokens))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", NAMES)
def test_every_leaf_is_reached_and_each_call_keeps_its_whole_path(name, sampling):
    topology = LIBRARY.get(name)
    paths = leaf_paths(topology)
    # A whole path and one token more for every leaf, and the call that max_tokens may cut.
    num_tokens = sum(len(path) + 1 for path in paths) + 2 * (topology.depth + 1)
    asked = [
        request_of(f"r{idx}", prompt, 100 + idx, max_tokens=num_tokens, **SAMPLINGS[sampling])
        for idx, prompt in enumerate(prompts(2))
    ]
    plain = {
        n: text for r in asked for n, text in run(build_engine(TARGET, None, EngineShape()), [r]).items()
    }
    texts = {r.sampling.seed: (*r.prompt_token_ids, *plain[r.request_id]) for r in asked}
    drafter = PathDrafter(texts, topology)
    engine = build_engine(TARGET, drafter, EngineShape(mode=name))
    outputs = {r.request_id: [] for r in asked}
    accepted = {r.request_id: [] for r in asked}
    for request in asked:
        engine.add(request)
    while engine.has_work:
        for delta in engine.step():
            outputs[delta.request_id] += delta.token_ids
            accepted[delta.request_id].append(delta.num_accepted_in_step)
    assert {n: tuple(tokens) for n, tokens in outputs.items()} == plain
    for request in asked:
        counts = accepted[request.request_id]
        assert len(counts) > len(paths), "every leaf had its turn"
        # The last call may be cut by max_tokens, and one more was in flight by then.
        assert counts[:-1] == drafter.drafted[request.sampling.seed][: len(counts) - 1]
