"""The replay kernel draws the paths that torch draws.

It runs on a GPU, or under TRITON_INTERPRET=1 on a CPU.
"""

import pytest
import torch

pytest.importorskip("triton")

from engine.runner.replay import edge_table, raise_path, raise_path_on_cuda
from engine.speculation import DraftOutput, TreeTensors
from engine.tree.library import DEFAULT_PROFILE
from engine.tree.search import search
from engine.tree.topology import TreeTopology, chain, root_only

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TREES = {
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("trees", TREES.values(), ids=TREES)
def test_kernel_equals_torch(trees, dtype):
    num_nodes, vocab_size = max(tree.num_nodes for tree in trees), 70
    tree = TreeTensors.build(trees, num_nodes, DEVICE)
    # One column more, as a drafter keeps: rows are not contiguous. Tokens of a row are distinct.
    drafted = torch.stack([torch.randperm(vocab_size)[: num_nodes + 1] for _ in trees]).to(DEVICE)
    draft = DraftOutput(drafted[:, :num_nodes])
    edges = edge_table(DEFAULT_PROFILE).to(DEVICE)
    lengths = set()
    for position in (5, 1000, 2**33):
        positions = torch.full((len(trees),), position, device=DEVICE)
        for seed in range(4):
            seeds = torch.arange(len(trees), device=DEVICE) * -(2**40) + seed
            found = torch.zeros(len(trees), num_nodes, vocab_size, dtype=dtype, device=DEVICE)
            expected = found.clone()
            raise_path_on_cuda(found, draft, tree, edges, seeds, positions)
            raise_path(expected, draft, tree, edges, seeds, positions)
            assert torch.equal(found, expected)
            lengths |= set((found > 0).sum((1, 2)).tolist())
    assert len(lengths) > 1
