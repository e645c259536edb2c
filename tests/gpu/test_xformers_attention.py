"""The xformers backend against a float64 dense softmax; what it cannot serve it refuses."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("xformers")

from xformers import _cpp_lib

from engine.attention.registry import create_backend
from engine.attention.xformers import XformersAttention
from engine.errors import ConfigError
from tests.attention.cases import Problem, make_problem, solve_densely
from tests.attention.chunk_cases import make_chunks, solve_chunks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="xformers computes on CUDA only"),
]


def move(problem):
    layout = problem.layout
    names = ("block_tables", "prefix_start", "prefix_end", "suffix_mask")
    moved = replace(layout, **{name: getattr(layout, name).cuda() for name in names})
    return Problem(moved, problem.block_size, tuple(x.cuda() for x in problem.tensors))


def share_windows(problem):
    """Return the problem with one window per row, shared by stride."""
    start, end = (x[:, :1].expand(x.shape) for x in (problem.layout.prefix_start, problem.layout.prefix_end))
    return replace(problem, layout=replace(problem.layout, prefix_start=start, prefix_end=end))


def assert_right(problem):
    expected = solve_densely(problem)
    found = move(problem).solve(XformersAttention()).cpu().double()
    assert ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max() <= 1e-2


@pytest.mark.parametrize("block_size", [64, 128, 256])
@pytest.mark.parametrize("windows", ["random", "full", "empty"])
@pytest.mark.parametrize("is_shared", [False, True])
def test_page_sizes_and_windows(block_size, windows, is_shared):
    problem = make_problem(
        block_size=block_size, windows=windows, head_dim=64, dtype=torch.bfloat16, num_rows=4
    )
    assert_right(share_windows(problem) if is_shared else problem)


@pytest.mark.parametrize("num_nodes", [1, 4, 16, 64])
@pytest.mark.parametrize(("num_kv_heads", "group"), [(3, 3), (2, 4), (1, 1)])
def test_nodes_and_groups(num_nodes, num_kv_heads, group):
    options = {"num_nodes": num_nodes, "num_kv_heads": num_kv_heads, "group": group, "head_dim": 64}
    assert_right(share_windows(make_problem(block_size=64, dtype=torch.float16, **options)))


def test_no_pages_and_a_wider_suffix():
    assert_right(make_problem(num_blocks=0, block_size=64, num_suffix=33, head_dim=64, dtype=torch.bfloat16))


def test_chunks_of_prompts():
    chunks = make_chunks(block_size=64, head_dim=64, dtype=torch.bfloat16)
    layout = chunks.layout
    names = ("block_tables", "cu_seqlens", "starts", "window_starts")
    moved = replace(layout, **{name: getattr(layout, name).cuda() for name in names})
    found = XformersAttention().bind_prefill(moved, 64)(*(x.cuda() for x in chunks.tensors))
    expected = solve_chunks(chunks)
    assert ((found.cpu() - expected).norm(dim=-1) / expected.norm(dim=-1)).max() <= 1e-2


def test_what_it_cannot_serve_is_refused():
    problem = make_problem(block_size=16, dtype=torch.bfloat16, head_dim=64)
    with pytest.raises(ConfigError, match="multiple of 64"):
        move(problem).solve(XformersAttention())
    problem = make_problem(block_size=64, dtype=torch.bfloat16, head_dim=64)
    with pytest.raises(ConfigError, match="CUDA only"):
        problem.solve(XformersAttention())
    with pytest.raises(ConfigError, match="float16 or bfloat16"):
        move(problem).solve(XformersAttention(), torch.float32)


def test_xformers_without_its_compiled_library_is_refused_at_load(monkeypatch):
    monkeypatch.setattr(_cpp_lib, "_built_with_cuda", False)
    monkeypatch.setattr(_cpp_lib, "_cpp_library_load_exception", OSError("libcudart.so.12 not found"))
    with pytest.raises(ConfigError, match=r"cannot run on CUDA here: libcudart\.so\.12 not found"):
        create_backend("xformers", torch.device("cuda"))
