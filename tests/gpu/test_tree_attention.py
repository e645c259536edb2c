"""The Triton tree attention against a float64 oracle, on a GPU, or on less under TRITON_INTERPRET=1."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from engine.attention.backend import AttentionLayout
from engine.attention.triton import TritonAttention, processor_count
from engine.kernels.tree_attention import attend_tree
from engine.kernels.tree_attention_config import TreeConfig, TreeShape, choose_config
from engine.kernels.tree_attention_plan import make_plan
from tests.attention.cases import Problem, make_problem

pytestmark = pytest.mark.gpu

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter multiplies bfloat16 by its bits.
DTYPES = [torch.float16, torch.float32] + ([torch.bfloat16] if ON_GPU else [])
OVERLAP = ON_GPU and torch.cuda.get_device_capability() >= (9, 0)
HALF = torch.bfloat16 if ON_GPU else torch.float16
LENGTH = 1500 if ON_GPU else 150
OUT_LIMIT, LSE_LIMIT = 1e-2, 1e-3


def move(problem):
    layout = problem.layout
    parts = (layout.block_tables, layout.prefix_start, layout.prefix_end, layout.suffix_mask)
    tensors = tuple(x.to(DEVICE) for x in problem.tensors)
    return Problem(AttentionLayout(*(x.to(DEVICE) for x in parts)), problem.block_size, tensors)


def draw(block_size=64, length=LENGTH, **options):
    return move(make_problem(block_size=block_size, num_blocks=-(-length // block_size), **options))


def oracle(problem, k_scale=1.0, v_scale=1.0):
    """Return (out [B, N, Hq, D], lse [B, N, Hq]) in float64."""
    q, k, v, k_pages, v_pages = (x.double() for x in problem.tensors)
    layout = problem.layout
    tables = layout.block_tables
    group = q.shape[2] // k.shape[2]
    keys = torch.cat((k_pages[tables].flatten(1, 2), k), 1) * k_scale
    values = torch.cat((v_pages[tables].flatten(1, 2), v), 1) * v_scale
    keys, values = (x.repeat_interleave(group, 2) for x in (keys, values))
    position = torch.arange(tables.shape[1] * problem.block_size, device=q.device)
    prefix = (position >= layout.prefix_start[..., None]) & (position < layout.prefix_end[..., None])
    mask = torch.cat((prefix, layout.suffix_mask), -1)
    scores = torch.einsum("bnhd,bshd->bhns", q, keys) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    out = torch.einsum("bhns,bshd->bnhd", (scores - lse[..., None]).exp(), values)
    return out, lse.transpose(1, 2)


def config_of(problem):
    q, k, *_ = problem.tensors
    limit = problem.layout.block_tables.shape[1] * problem.block_size
    return choose_config(TreeShape.of(q, k, limit), processor_count(DEVICE))


def solve(problem, config=None, **scales):
    """Return (out, lse) of the kernel."""
    config = config or config_of(problem)
    layout = problem.layout
    windows = (layout.prefix_start, layout.prefix_end)
    limit = layout.block_tables.shape[1] * problem.block_size
    plan = make_plan(*windows, layout.suffix_mask, config=config, limit=limit)
    lse = torch.full(problem.tensors[0].shape[:3], torch.nan, device=DEVICE)
    tensors = (*problem.tensors, layout.block_tables, *windows)
    return attend_tree(*tensors, config=config, plan=plan, lse=lse, overlap=OVERLAP, **scales), lse


def distance(found, expected):
    """Return the largest relative L2 distance of any row, over the last dimension."""
    found, expected = found.double(), expected.double()
    return ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()


def is_right(found, expected):
    out_distance, lse_distance = (distance(*pair) for pair in zip(found, expected, strict=True))
    return out_distance <= OUT_LIMIT and lse_distance <= LSE_LIMIT


def assert_right(problem, config=None):
    found, expected = solve(problem, config), oracle(problem)
    assert found[0].isfinite().all()
    assert found[0].dtype == problem.tensors[0].dtype
    for name, pair, limit in zip(
        ("out", "lse"), zip(found, expected, strict=True), (OUT_LIMIT, LSE_LIMIT), strict=True
    ):
        assert distance(*pair) <= limit, (name, distance(*pair))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("windows", ["random", "full", "empty"])
def test_page_sizes_and_windows(block_size, windows, dtype):
    assert_right(draw(block_size, windows=windows, dtype=dtype, head_dim=64))


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 1), (3, 3), (2, 4), (1, 8), (2, 5)])
def test_heads_and_groups(num_kv_heads, group, head_dim):
    assert_right(draw(num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, dtype=HALF))


@pytest.mark.parametrize("num_nodes", [1, 2, 4, 8, 13, 16, 32, 48, 64])
def test_node_counts(num_nodes):
    assert_right(draw(num_nodes=num_nodes, num_suffix=num_nodes, group=4, head_dim=128, dtype=HALF, seed=3))


@pytest.mark.parametrize(("num_nodes", "num_suffix"), [(1, 65), (4, 65), (3, 33), (16, 64), (2, 5)])
def test_a_suffix_wider_than_the_queries(num_nodes, num_suffix):
    problem = draw(num_nodes=num_nodes, num_suffix=num_suffix, dtype=HALF, head_dim=64)
    assert_right(problem)


@pytest.mark.parametrize("num_rows", [1, 3, 33])
def test_ragged_rows_with_dummies_and_single_keys(num_rows):
    problem = draw(num_rows=num_rows, num_nodes=4, head_dim=64, dtype=HALF, num_kv_heads=1, windows="full")
    ends = torch.randint(0, LENGTH, (num_rows, 1), generator=torch.Generator().manual_seed(1)) ** 2 // LENGTH
    for row, end in enumerate((0, 1, LENGTH)[:num_rows]):
        ends[row] = end
    problem.layout.prefix_end[:] = ends.to(DEVICE)
    problem.layout.block_tables[0] = 0
    assert_right(problem)


def test_no_pages_at_all():
    assert_right(draw(length=0, dtype=HALF, head_dim=64))


def test_windows_that_start_and_end_inside_the_tree():
    problem = draw(num_nodes=16, head_dim=64, dtype=HALF, windows="full")
    node = torch.arange(16, device=DEVICE)
    problem.layout.prefix_start[:] = 60 + node
    problem.layout.prefix_end[:] = 70 + 3 * node
    problem.layout.prefix_end[1, 5:] = 0
    assert_right(problem)


def test_a_window_that_all_nodes_share_by_stride():
    problem = draw(num_nodes=4, head_dim=64, dtype=HALF)
    layout = problem.layout
    start, end = (x[:, :1].expand(-1, 4) for x in (layout.prefix_start, layout.prefix_end))
    assert_right(replace(problem, layout=replace(layout, prefix_start=start, prefix_end=end)))


# block_m, block_n, warps, stages, registers, slots, min_tiles, idle_percent
CONFIGS = [
    TreeConfig(16, 64, 4, 4, None, 7, 1, 55),
    TreeConfig(16, 32, 2, 3, None, 5, 2, 100),
    TreeConfig(16, 64, 4, 3, None, 1, 1, 55),
    TreeConfig(32, 64, 4, 3, None, 40, 1, 55),
    TreeConfig(32, 128, 8, 2, None, 3, 1, 55),
    TreeConfig(64, 64, 4, 2, 168, 6, 1, 55),
    TreeConfig(64, 64, 4, 2, None, 0, 1, 55),
    TreeConfig(16, 64, 4, 2, None, 0, 1, 55),
    TreeConfig(128, 64, 8, 2, None, 2, 9, 100),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("windows", ["random", "full"])
def test_every_cut_gives_the_same(config, windows):
    assert_right(draw(num_rows=3, num_nodes=7, group=3, head_dim=64, dtype=HALF, windows=windows), config)


def test_layouts_of_pages_and_packed_projections():
    problem = draw(num_nodes=3, head_dim=64, dtype=HALF, group=2)
    q, k, v, k_pages, v_pages = problem.tensors
    packed = torch.cat((q, k, v), 2)
    q, k, v = packed.split((q.shape[2], k.shape[2], v.shape[2]), 2)
    by_head = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k_pages, v_pages))
    assert_right(replace(problem, tensors=(q, k, v, *by_head)))


@pytest.mark.parametrize("num_nodes", [1, 5, 20])
def test_float8_pages_with_a_scale_per_head(num_nodes):
    problem = draw(num_nodes=num_nodes, head_dim=64, dtype=HALF, num_kv_heads=2, group=4)
    q, *rest = problem.tensors
    quantized = tuple(x.to(torch.float8_e4m3fn) for x in rest)
    problem = replace(problem, tensors=(q, *quantized))
    k_scale, v_scale = (torch.tensor(pair, device=DEVICE) for pair in ((0.5, 1.5), (0.25, 3.0)))
    expected = oracle(problem, k_scale[:, None], v_scale[:, None])
    assert is_right(solve(problem, k_scale=k_scale, v_scale=v_scale), expected)


def needles(num_nodes=8):
    """Return a problem where every key that a node may or may not read holds a value of its own.

    All scores are equal and a node reads at most 5 suffix and 3 prefix keys: a key more or less moves its own
    component of the output between 0 and at least 8 / 8.
    """
    problem = draw(num_rows=2, num_nodes=num_nodes, head_dim=64, dtype=HALF, num_kv_heads=1, windows="full")
    q, _, v, _, v_pages = (x.zero_() for x in problem.tensors)
    q += 1
    node = torch.arange(num_nodes, device=DEVICE)
    v[:, node, 0, node] = 8
    layout = problem.layout
    layout.prefix_start[:], layout.prefix_end[:] = 63, 65
    for row in range(2):
        for position in range(60, 68):
            block = layout.block_tables[row, position // problem.block_size]
            v_pages[block, position % problem.block_size, 0, position - 60 + 32] = 8
    layout.suffix_mask[:] = (node[:, None] >= node) & (node[:, None] - node < 5)
    return problem


MUTATIONS = {
    "hides an ancestor": lambda layout: layout.suffix_mask[1, 6].__setitem__(4, False),
    "shows a stranger": lambda layout: layout.suffix_mask[0, 3].__setitem__(7, True),
    "starts late": lambda layout: layout.prefix_start[1].__setitem__(2, 64),
    "starts early": lambda layout: layout.prefix_start[0].__setitem__(2, 62),
    "ends late": lambda layout: layout.prefix_end[0].__setitem__(7, 66),
    "ends early": lambda layout: layout.prefix_end[1].__setitem__(0, 64),
    "swaps pages": lambda layout: layout.block_tables[1, :2].copy_(layout.block_tables[1, :2].flip(0)),
}


def test_needles_are_found():
    assert_right(needles())


@pytest.mark.parametrize("name", MUTATIONS)
def test_one_wrong_key_is_noticed(name):
    problem = needles()
    expected = oracle(problem)
    MUTATIONS[name](problem.layout)
    found = solve(problem)
    assert (found[0] - expected[0]).abs().max() > 0.5
    assert not is_right(found, expected)
    assert is_right(found, oracle(problem))


def test_the_backend_equals_its_kernel_and_rows_do_not_mix():
    problem = draw(num_rows=3, head_dim=64, dtype=HALF)
    backend = TritonAttention()
    whole = problem.solve(backend)
    assert torch.equal(whole, solve(problem)[0])
    problem.layout.block_tables[1] = 0
    problem.layout.prefix_end[1] = 0
    problem.layout.prefix_start[1] = 0
    assert distance(problem.solve(backend)[[0, 2]], whole[[0, 2]]) < OUT_LIMIT


@pytest.mark.skipif(not ON_GPU, reason="graphs need CUDA")
@pytest.mark.parametrize("num_nodes", [1, 4, 16, 64])
def test_graph_replay_equals_eager_after_lengths_and_tables_change(num_nodes):
    problem = draw(num_rows=4, num_nodes=num_nodes, head_dim=128, dtype=HALF, num_kv_heads=2, group=4)
    backend, layout = TritonAttention(), problem.layout
    problem.solve(backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = problem.solve(backend)
    for seed in range(3):
        other = draw(num_rows=4, num_nodes=num_nodes, head_dim=128, num_kv_heads=2, group=4, seed=seed)
        for name in ("block_tables", "prefix_start", "prefix_end", "suffix_mask"):
            getattr(layout, name).copy_(getattr(other.layout, name))
        for tensor, new in zip(problem.tensors, other.tensors, strict=True):
            tensor.copy_(new)
        graph.replay()
        assert torch.equal(captured, problem.solve(backend))
        assert_right(problem)
