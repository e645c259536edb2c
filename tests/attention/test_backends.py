"""Every backend equals a dense softmax, and so the reference, on random and on edge shapes."""

import pytest
import torch

from engine.attention.cpu import CpuAttention
from engine.attention.reference import ReferenceAttention
from engine.tree.library import TreeLibrary
from tests.attention.cases import Problem, make_problem, solve_densely

BACKENDS = [ReferenceAttention(), CpuAttention()]
# Against float64 over the same (rounded) inputs: float32 sums, and bfloat16 weights and outputs near 1.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}

every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def assert_right(problem, backend):
    found = problem.solve(backend)
    dtype = problem.tensors[0].dtype
    assert found.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), solve_densely(problem), atol=tolerance, rtol=tolerance)


@every_backend
@every_dtype
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("windows", ["random", "full", "empty"])
def test_page_sizes_and_windows(backend, dtype, block_size, windows):
    assert_right(make_problem(block_size=block_size, windows=windows, dtype=dtype), backend)


@every_backend
@every_dtype
@pytest.mark.parametrize("num_nodes", [1, 2, 7, 33, 64])
def test_node_counts(backend, dtype, num_nodes):
    assert_right(make_problem(num_nodes=num_nodes, dtype=dtype, seed=num_nodes), backend)


@every_backend
@every_dtype
@pytest.mark.parametrize(("group", "num_kv_heads"), [(1, 1), (1, 4), (2, 3), (3, 3), (5, 1), (8, 2)])
def test_group_sizes(backend, dtype, group, num_kv_heads):
    assert_right(make_problem(group=group, num_kv_heads=num_kv_heads, dtype=dtype), backend)


@every_backend
@every_dtype
def test_head_dim_of_real_models(backend, dtype):
    assert_right(make_problem(head_dim=128, num_blocks=40, block_size=16, dtype=dtype), backend)


@every_backend
@every_dtype
@pytest.mark.parametrize("num_nodes", [1, 5])
def test_no_pages_at_all(backend, dtype, num_nodes):
    assert_right(make_problem(num_blocks=0, num_nodes=num_nodes, dtype=dtype), backend)


@every_backend
def test_suffix_may_be_wider_than_the_queries(backend):
    assert_right(make_problem(num_nodes=3, num_suffix=11), backend)


@every_backend
@pytest.mark.parametrize("seed", range(8))
def test_random_problems(backend, seed):
    assert_right(make_problem(seed=seed, num_rows=1 + seed, num_nodes=1 + 3 * seed, block_size=16), backend)


@every_backend
@every_dtype
def test_a_dummy_row_is_finite_and_changes_no_other_row(backend, dtype):
    problem = make_problem(num_rows=3, windows="full", dtype=dtype)
    expected = problem.solve(backend)
    problem.layout.block_tables[1] = 0
    problem.layout.prefix_end[1] = 0
    found = problem.solve(backend)
    assert torch.equal(found[[0, 2]], expected[[0, 2]])
    assert_right(problem, backend)


@every_backend
@every_dtype
def test_rows_answer_as_they_do_alone(backend, dtype):
    problem = make_problem(num_rows=4, dtype=dtype)
    found = problem.solve(backend)
    layout = problem.layout
    for row in range(4):
        own = slice(row, row + 1)
        parts = (layout.block_tables, layout.prefix_start, layout.prefix_end, layout.suffix_mask)
        q, k, v, *pages = problem.tensors
        alone = Problem(
            type(layout)(*(x[own] for x in parts)), problem.block_size, (q[own], k[own], v[own], *pages)
        )
        torch.testing.assert_close(found[own], alone.solve(backend), atol=TOLERANCE[dtype] / 5, rtol=0)


def _spoil_unseen(problem, value):
    """Write `value` wherever no query of any row may read."""
    k_pages, v_pages = problem.tensors[3:]
    seen = torch.zeros(k_pages.shape[:2], dtype=torch.bool)
    position = torch.arange(problem.layout.block_tables.shape[1] * problem.block_size)
    layout = problem.layout
    shown = (position >= layout.prefix_start[..., None]) & (position < layout.prefix_end[..., None])
    blocks = shown.any(1).unflatten(-1, (-1, problem.block_size))
    seen[layout.block_tables] = blocks
    assert not seen.all()
    for pages in (k_pages, v_pages):
        pages[~seen] = value


@every_backend
@every_dtype
def test_large_values_in_unread_pages_do_not_matter(backend, dtype):
    problem = make_problem(num_nodes=2, dtype=dtype, seed=5)
    expected = problem.solve(backend)
    _spoil_unseen(problem, 1e4)
    assert torch.equal(problem.solve(backend), expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_the_reference_bears_any_value_in_unread_pages(value):
    problem = make_problem(num_nodes=2, seed=5)
    expected = problem.solve(ReferenceAttention())
    _spoil_unseen(problem, value)
    assert torch.equal(problem.solve(ReferenceAttention()), expected)


@every_backend
@every_dtype
def test_one_binding_serves_layers_that_differ(backend, dtype):
    problem, other = make_problem(dtype=dtype), make_problem(dtype=dtype, group=1, num_kv_heads=3)
    attend = backend.bind(problem.layout, problem.block_size)
    for tensors in (problem.tensors, other.tensors, problem.tensors):
        expected = backend.bind(problem.layout, problem.block_size)(*tensors)
        assert torch.equal(attend(*tensors), expected)


def test_the_reference_in_float64_is_exact():
    problem = make_problem(num_nodes=9, dtype=torch.float64)
    found = problem.solve(ReferenceAttention())
    torch.testing.assert_close(found, solve_densely(problem), atol=1e-13, rtol=1e-13)


@every_backend
def test_every_path_of_a_tree_equals_the_same_nodes_in_line(backend):
    topology = TreeLibrary.search().get("tree-64")
    tree = make_problem(num_rows=1, num_nodes=64, windows="full", block_size=16, num_blocks=3)
    layout = tree.layout
    layout.prefix_end[:] = 41
    for node, bits in enumerate(topology.ancestor_bits):
        layout.suffix_mask[0, node] = torch.tensor([bool(bits >> other & 1) for other in range(64)])
    found = tree.solve(backend)
    for node, bits in enumerate(topology.ancestor_bits):
        path = [other for other in range(64) if bits >> other & 1]
        window = torch.zeros(1, len(path), dtype=torch.int64)
        causal = torch.ones(1, len(path), len(path), dtype=torch.bool).tril()
        q, k, v, *pages = tree.tensors
        line = Problem(
            type(layout)(layout.block_tables, window, window + 41, causal),
            tree.block_size,
            (q[:, path], k[:, path], v[:, path], *pages),
        )
        torch.testing.assert_close(found[:, path], line.solve(backend), atol=2e-5, rtol=2e-5)
        assert path[-1] == node


@pytest.mark.parametrize("part", ["prefix_start", "prefix_end", "suffix_mask"])
def test_the_comparison_notices_one_wrong_key(part):
    """A control: were a backend one key off, `assert_right` would say so."""
    problem = make_problem(num_nodes=3, windows="full")
    expected = solve_densely(problem)
    changed = getattr(problem.layout, part)
    changed[0, 0] = ~changed[0, 0] | torch.tensor([True, False, False]) if part == "suffix_mask" else 1
    assert not torch.allclose(solve_densely(problem), expected, atol=3e-2)
