"""The kernels between matrix products equal the torch ops, bit for bit but for the last place of a norm.

They run on a GPU, or under TRITON_INTERPRET=1 on a CPU.
"""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels.commit import commit_rows
from engine.kernels.quantize import quantize_rows as quantize_tokens
from engine.layers.fp8_linear import Fp8Linear, quantize_rows
from engine.layers.int4_linear import (
    GROUP_SIZES,
    MAX_TOKENS,
    Int4Linear,
    dequantize_groups,
    quantize_groups,
)
from engine.layers.ops import TorchOps
from engine.layers.rotary import Rotary
from engine.layers.triton_ops import TritonOps
from engine.layers.tuned_linear import WideLinear

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-5
TORCH = TorchOps()
# Overlapped launches wait by an instruction that the interpreter lacks.
VARIANTS = [False, True] if DEVICE.type == "cuda" and torch.cuda.get_device_capability()[0] >= 9 else [False]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = [8, 100, 576, 4096, 8192]
# One unit in the last place: sums of another order may round the other way, once.
LAST_PLACE = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-20}

on_both = pytest.mark.parametrize("ops", [TritonOps(overlap=overlap) for overlap in VARIANTS], ids=VARIANTS)
in_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def draw(*shape, dtype, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator)).to(dtype).to(DEVICE)


def assert_last_place(found, expected, num_roundings=1):
    """Assert equality but for one unit in the last place per rounding, in half precision of few elements."""
    assert found.dtype == expected.dtype
    tolerance = LAST_PLACE[found.dtype] * num_roundings
    if found.dtype is torch.bfloat16 and DEVICE.type == "cpu":
        # The interpreter cuts bfloat16 off where the chip rounds, here up to twice in a row.
        torch.testing.assert_close(found, expected, rtol=4 * tolerance, atol=2 * tolerance, equal_nan=True)
        return
    atol = tolerance if found.dtype is torch.float32 else 0.0
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=atol, equal_nan=True)
    if found.dtype is not torch.float32:
        assert (~(found == expected) & ~found.isnan()).float().mean() < 0.01


@on_both
@in_dtypes
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("num_tokens", "scale"), [(1, 1.0), (5, 1e-3), (3, 100.0)])
def test_norm_equals_torch(ops, dtype, size, num_tokens, scale):
    x, weight = draw(num_tokens, size, dtype=dtype, scale=scale), draw(size, dtype=dtype, seed=1)
    assert_last_place(ops.norm(x, weight, EPS), TORCH.norm(x, weight, EPS))


@on_both
@in_dtypes
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_add_norm_equals_torch_and_adds_exactly(ops, dtype, size, num_tokens):
    delta, residual = draw(2, num_tokens, size, dtype=dtype)
    weight = draw(size, dtype=dtype, seed=1)
    normed, total = ops.add_norm(delta, residual, weight, EPS)
    expected_normed, expected_total = TORCH.add_norm(delta, residual, weight, EPS)
    assert_last_place(total, expected_total)
    if dtype is not torch.bfloat16 or DEVICE.type == "cuda":
        assert torch.equal(total, expected_total)
    assert_last_place(normed, expected_normed)


@on_both
@in_dtypes
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_embed_equals_torch(ops, dtype, size, num_tokens):
    rows, weight = draw(40, size, dtype=dtype, scale=30.0), draw(size, dtype=dtype, seed=1)
    generator = torch.Generator().manual_seed(2)
    token_ids = torch.randint(-1, 40, (num_tokens,), generator=generator).to(DEVICE)
    positions = torch.randint(0, 200, (num_tokens,), generator=generator).to(DEVICE)
    table = Rotary(12, 1e4, None, 200, dtype).to(DEVICE).table
    given = token_ids, positions, rows, table, weight, EPS
    (normed, embedded, angles), expected = ops.embed(*given), TORCH.embed(*given)
    assert_last_place(normed, expected[0])
    assert torch.equal(embedded[:, :size], expected[1])
    assert embedded.shape[1] == (size if dtype is torch.float32 else 2 * size)
    assert not embedded[:, size:].any()
    for mine, other in zip(angles, expected[2], strict=True):
        assert torch.equal(mine, other)


@on_both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_a_residual_of_two_numbers_keeps_twice_the_digits(ops, dtype, size):
    weight = draw(size, dtype=dtype, seed=1)
    exact = draw(5, size, dtype=dtype, scale=30.0)
    residual, exact = torch.cat((exact, torch.zeros_like(exact)), 1), exact.double()
    for step in range(20):
        delta = draw(5, size, dtype=dtype, seed=2 + step)
        normed, residual = ops.add_norm(delta, residual, weight, EPS)
        exact += delta.double()
    found = residual[:, :size].double() + residual[:, size:].double()
    # Once rounded, twenty sums would each be off by up to half a unit in the last place of about 30: 2^-4.
    torch.testing.assert_close(found, exact, rtol=0, atol=20 * 128 * LAST_PLACE[dtype] ** 2)
    # Not always the nearest: of two that are equally near the sum rounds to one, its digits here to the
    # other.
    torch.testing.assert_close(residual[:, :size], found.to(dtype), rtol=LAST_PLACE[dtype], atol=0)
    assert_last_place(normed, TORCH.norm(found.float(), weight.float(), EPS).to(dtype))


@on_both
def test_norms_read_rows_that_lie_apart(ops):
    wide = draw(4, 300, dtype=torch.bfloat16)
    x, other, weight = wide[:, 100:200], wide[:, 200:], draw(100, dtype=torch.bfloat16, seed=1)
    assert_last_place(ops.norm(x, weight, EPS), TORCH.norm(x, weight, EPS))
    for found, expected in zip(
        ops.add_norm(x, other, weight, EPS), TORCH.add_norm(x, other, weight, EPS), strict=True
    ):
        assert_last_place(found, expected)


@on_both
def test_a_row_that_is_not_finite_spoils_only_itself(ops):
    x = draw(4, 576, dtype=torch.bfloat16)
    x[1, 7], x[2, 500] = torch.nan, torch.inf
    weight = torch.ones(576, dtype=torch.bfloat16, device=DEVICE)
    found = ops.norm(x, weight, EPS)
    assert_last_place(found[[0, 3]], TORCH.norm(x, weight, EPS)[[0, 3]])
    assert found[1].isnan().all()
    assert not found[2].isfinite().all()


@on_both
@in_dtypes
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1536), (3, 14336), (5, 100), (2, 1025)])
def test_silu_mul_equals_torch(ops, dtype, num_tokens, size):
    gate_up = draw(num_tokens, 2 * size, dtype=dtype, scale=4.0)
    assert_last_place(ops.silu_mul(gate_up), TORCH.silu_mul(gate_up), num_roundings=2)


@on_both
def test_silu_mul_closes_and_opens_fully_and_passes_nan_on(ops):
    gate = torch.tensor([-1e4, 1e4, torch.nan, 0.0], dtype=torch.bfloat16, device=DEVICE)
    found = ops.silu_mul(torch.cat((gate, torch.full_like(gate, 2.0)))[None])[0].tolist()
    assert found[:2] == [0.0, 2 * gate[1].item()]
    assert found[2] != found[2]
    assert found[3] == 0.0


def heads(num_tokens, num_heads, num_kv_heads, head_dim, dtype):
    """Return (qkv, angles), keys and values of every fourth token or so not finite, queries neither."""
    qkv = draw(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    qkv[0, num_heads, 1], qkv[-1, -1, -1] = torch.nan, -torch.inf
    qkv[num_tokens // 2, num_heads + num_kv_heads, 0], qkv[num_tokens // 2, num_heads, 0] = (
        torch.inf,
        torch.inf,
    )
    positions = torch.randint(0, 4000, (num_tokens,), generator=torch.Generator().manual_seed(3))
    return qkv, Rotary(head_dim, 500000.0, None, 4000, dtype).to(DEVICE)(positions.to(DEVICE))


SHAPES = [(1, 9, 3, 64), (5, 32, 8, 128), (3, 64, 8, 128), (4, 3, 1, 12), (2, 16, 16, 64)]


@on_both
@in_dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("is_indexed", [False, True])
def test_rope_store_equals_torch(ops, dtype, shape, is_indexed):
    qkv, angles = heads(*shape, dtype)
    num_tokens, _, num_kv_heads, head_dim = shape
    dest_idx = torch.randperm(17, generator=torch.Generator().manual_seed(4))[:num_tokens].to(DEVICE)
    answers = []
    for one in (ops, TORCH):
        dests = torch.full((2, 17, num_kv_heads, head_dim), 7.0, dtype=dtype, device=DEVICE)
        q = one.rope_store(qkv.clone(), angles, *dests, dest_idx if is_indexed else None)
        answers.append((q, dests))
    for found, expected in zip(*answers, strict=True):
        assert_last_place(found, expected)
    assert answers[0][1].isfinite().all()


@on_both
@in_dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("is_indexed", "is_scaled"), [(False, True), (True, True), (True, False)])
def test_rope_store_into_float8_equals_torch(ops, dtype, shape, is_indexed, is_scaled):
    qkv, angles = heads(*shape, dtype)
    num_tokens, num_heads, num_kv_heads, head_dim = shape
    qkv[:, num_heads] *= 1000.0  # beyond the largest number of the destination
    dest_idx = torch.randperm(17, generator=torch.Generator().manual_seed(4))[:num_tokens].to(DEVICE)
    scales = tuple(0.1 + draw(2, num_kv_heads, dtype=torch.float32).abs()) if is_scaled else None
    answers = []
    for one in (ops, TORCH):
        dests = torch.zeros(2, 17, num_kv_heads, head_dim, device=DEVICE).to(torch.float8_e4m3fn)
        one.rope_store(qkv.clone(), angles, *dests, dest_idx if is_indexed else None, scales)
        answers.append(dests.float())
    # The interpreter loses the carry of a mantissa that rounds up to a power of two.
    tolerance, share = (0.0, 0.01) if DEVICE.type == "cuda" else (2.0**-3, 0.06)
    gap = (answers[0] - answers[1]).abs()
    assert answers[0].isfinite().all()
    assert (gap > tolerance * answers[1].abs()).float().mean() < share
    # What was not finite is 0 on both sides, neither NaN nor the largest number.
    assert (answers[0].abs() < 2.0**-7)[answers[1] == 0].all()
    if DEVICE.type == "cuda":
        torch.testing.assert_close(*answers, rtol=2.0**-3, atol=2.0**-9)
    assert (answers[0].abs() == 448).any()


@on_both
def test_rope_store_reaches_slots_beyond_32_bits(ops):
    if DEVICE.type == "cpu":
        pytest.skip("needs 4 GB for one row")
    qkv, angles = heads(2, 32, 8, 128, torch.bfloat16)
    dests = torch.zeros(2, 2**31 // 1024 + 8, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    last = dests.shape[1] - 1
    ops.rope_store(qkv.clone(), angles, *dests, torch.tensor([last, 3], device=DEVICE))
    expected = torch.zeros(2, 2, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    TORCH.rope_store(qkv, angles, *expected)
    assert_last_place(dests[:, [last, 3]], expected)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=["bf16", "fp32", "fp8"]
)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(3, 64), (8, 128), (1, 12)])
def test_commit_moves_every_layer_and_leaves_the_dummy_alone(dtype, num_kv_heads, head_dim):
    shape = num_kv_heads, head_dim
    k_scratch, v_scratch = draw(2, 3, 9, *shape, dtype=torch.float32).to(dtype)
    k_pages, v_pages = draw(2, 3, 20, *shape, dtype=torch.float32, seed=1).to(dtype)
    src = torch.tensor([8, 0, 3, 3, 5], device=DEVICE)
    dest = torch.tensor([4, 19, 0, 7, 0], device=DEVICE)
    is_kept = dest != 0
    expected = []
    for pages, scratch in ((k_pages, k_scratch), (v_pages, v_scratch)):
        moved = pages.float()
        moved[:, dest[is_kept]] = scratch.float()[:, src[is_kept]]
        expected.append(moved)
    commit_rows(k_scratch, v_scratch, src, k_pages, v_pages, dest)
    assert torch.equal(k_pages.float(), expected[0])
    assert torch.equal(v_pages.float(), expected[1])


@pytest.mark.parametrize("overlap", VARIANTS)
@in_dtypes
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 576), (5, 4096), (3, 14336), (2, 100)])
@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e4])
def test_quantized_rows_equal_torch(overlap, dtype, num_tokens, size, scale):
    x = draw(num_tokens, size, dtype=dtype, scale=scale).clamp(-6e4, 6e4)
    # On a CPU, since torch divides by a number on CUDA by multiplying with its reciprocal.
    found = quantize_tokens(x, overlap=overlap)
    expected = tuple(part.to(DEVICE) for part in quantize_rows(x.cpu()))
    assert torch.equal(found[1], expected[1])
    answers = found[0].float(), expected[0].float()
    # The interpreter loses the carry of a mantissa that rounds up to a power of two.
    share = 0.0 if DEVICE.type == "cuda" else 0.06
    assert (answers[0] != answers[1]).float().mean() <= share


@pytest.mark.parametrize("overlap", VARIANTS)
def test_quantized_rows_of_zeros_and_of_what_is_not_finite_equal_torch(overlap):
    x = draw(5, 100, dtype=torch.bfloat16)
    x[0], x[1, 7], x[2, 0], x[3, 99] = 0.0, torch.nan, torch.inf, -torch.inf
    (rows, scale), (_, expected) = quantize_tokens(x, overlap=overlap), quantize_rows(x.cpu())
    torch.testing.assert_close(scale.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    assert (rows[0].float() == 0).all()


@pytest.mark.parametrize(
    ("num_tokens", "shape"), [(1, (1536, 512)), (5, (3072, 576)), (16, (576, 1536)), (64, (4096, 1024))]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_layers_in_few_bits_answer_as_their_stored_weights_do(num_tokens, shape, has_bias):
    weight, x = draw(*shape, dtype=torch.bfloat16), draw(num_tokens, shape[1], dtype=torch.bfloat16, seed=1)
    bias = draw(shape[0], dtype=torch.bfloat16, seed=2) if has_bias else None
    make = partial(Fp8Linear, quantize_rows=quantize_tokens) if DEVICE.type == "cuda" else Fp8Linear
    group_size = next(size for size in GROUP_SIZES if shape[1] % size == 0)
    # Plain products, since not every version of torch has those in few bits on a CPU.
    float8 = [rows.double() * scale.double() for rows, scale in map(quantize_rows, (x, weight))]
    four_bits = dequantize_groups(*quantize_groups(weight, group_size)).double()
    kept = weight.double() if num_tokens > MAX_TOKENS else four_bits
    shift = 0.0 if bias is None else bias.double()
    for found, expected in (
        (make(weight, bias)(x), float8[0] @ float8[1].T + shift),
        (Int4Linear(weight, bias)(x), x.double() @ kept.T + shift),
    ):
        assert (found.double() - expected).norm() / expected.norm() < 0.01


@pytest.mark.skipif(DEVICE.type == "cpu", reason="on CUDA alone a product of bfloat16 answers in float32")
@pytest.mark.parametrize("num_tokens", [1, 5, 256])
def test_a_wide_head_does_not_round_its_answer(num_tokens):
    weight, x = draw(4096, 576, dtype=torch.bfloat16), draw(num_tokens, 576, dtype=torch.bfloat16, seed=1)
    found, expected = WideLinear(weight)(x), x.double() @ weight.double().T
    assert found.dtype == torch.float32
    assert (found - expected).norm() / expected.norm() < 1e-5  # a rounding to bfloat16 costs 2e-3


def test_kernels_replay_in_a_graph():
    if DEVICE.type == "cpu":
        pytest.skip("no graphs")
    _, angles = heads(4, 9, 3, 64, torch.bfloat16)
    delta, residual = draw(2, 4, 576, dtype=torch.bfloat16)
    weight = draw(576, dtype=torch.bfloat16, seed=1)
    for overlap in VARIANTS:
        ops = TritonOps(overlap=overlap)
        dests = torch.zeros(2, 4, 3, 64, dtype=torch.bfloat16, device=DEVICE)

        def step(ops=ops, dests=dests):
            # Each launch reads what the one before wrote.
            normed, total = ops.add_norm(delta, residual, weight, EPS)
            gated = ops.silu_mul(torch.cat((normed, total), dim=-1))
            q = ops.rope_store(gated.view(4, 9, 64).repeat(1, 2, 1)[:, :15].contiguous(), angles, *dests)
            return ops.norm(q.reshape(4, -1), weight, EPS)

        expected, stored = step().clone(), dests.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        dests.zero_()
        for _ in range(50):
            graph.replay()
        assert torch.equal(found, expected)
        assert torch.equal(dests, stored)
