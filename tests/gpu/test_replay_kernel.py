"""The replay kernel draws the paths that torch draws.

It runs on a GPU, or under TRITON_INTERPRET=1 on a CPU.
"""

import pytest
import torch

pytest.importorskip("triton")

from engine.runner.replay import edge_table, replay, replay_on_cuda
from engine.speculation import DraftOutput, TreeTensors, Verification
from engine.tree.library import DEFAULT_PROFILE
from engine.tree.search import search
from engine.tree.topology import TreeTopology, chain, root_only

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TREES = {
    "roots": (root_only(), root_only()),
    "chains": (chain(3),) * 9,
    "one row": (chain(7),),
    "wide": (search(DEFAULT_PROFILE, 64, 7),) * 4,
    "of every kind": (
        root_only(),
        chain(5),
        search(DEFAULT_PROFILE, 16, 5),
        TreeTopology("flat", (-1, 0, 0)),
    ),
}


@pytest.mark.parametrize("trees", TREES.values(), ids=TREES)
def test_kernel_equals_torch(trees):
    num_nodes = max(tree.num_nodes for tree in trees)
    tree = TreeTensors.build(trees, num_nodes, DEVICE)
    generator = torch.Generator().manual_seed(0)
    # One column more, as a drafter keeps: rows are not contiguous.
    drafted = torch.randint(1000, (len(trees), num_nodes + 1), generator=generator).to(DEVICE)
    draft = DraftOutput(drafted[:, :num_nodes])
    nothing = torch.zeros(len(trees), dtype=torch.int64, device=DEVICE)
    real = Verification(nothing, nothing, nothing + 7, nothing, nothing == 0)
    edges = edge_table(DEFAULT_PROFILE).to(DEVICE)
    lengths = set()
    for position in (5, 1000, 2**33):
        for seed in range(8):
            seeds = torch.arange(len(trees), device=DEVICE) * -(2**40) + seed
            args = (real, draft, tree, edges, seeds, nothing + position)
            found, expected = replay_on_cuda(*args), replay(*args)
            assert torch.equal(found.path, expected.path)
            assert torch.equal(found.num_accepted, expected.num_accepted)
            assert torch.equal(found.token_ids, expected.token_ids)
            lengths |= set(found.num_accepted.tolist())
    assert lengths == {0} if tree.depth == 0 else len(lengths) > 1
