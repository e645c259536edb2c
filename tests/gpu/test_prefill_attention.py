"""Prefill attention of Triton against a float64 oracle, on a GPU, or on less under TRITON_INTERPRET=1."""

import pytest
import torch

pytest.importorskip("triton")

from engine.attention.backend import PrefillLayout
from engine.attention.triton import TritonAttention
from engine.kernels.prefill_attention import PrefillConfig, attend_prefill
from tests.attention.chunk_cases import make_chunks, solve_chunks

pytestmark = pytest.mark.gpu

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter multiplies bfloat16 by its bits.
HALF = torch.bfloat16 if ON_GPU else torch.float16
LONG = 10 if ON_GPU else 1


def draw(**options):
    chunks = make_chunks(**{"dtype": HALF, "head_dim": 64, **options})
    layout = chunks.layout
    parts = (
        x.to(DEVICE) for x in (layout.block_tables, layout.cu_seqlens, layout.starts, layout.window_starts)
    )
    return type(chunks)(
        PrefillLayout(*parts, layout.chunk_lens),
        chunks.block_size,
        tuple(x.to(DEVICE) for x in chunks.tensors),
    )


def distance(found, expected):
    found, expected = found.double(), expected.double()
    return ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()


def assert_right(chunks):
    found = TritonAttention().bind_prefill(chunks.layout, chunks.block_size)(*chunks.tensors)
    assert found.dtype == chunks.tensors[0].dtype
    assert distance(found, solve_chunks(chunks)) <= 1e-2


@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
def test_page_sizes(block_size, dtype):
    assert_right(draw(block_size=block_size, dtype=dtype))


@pytest.mark.parametrize(
    ("num_kv_heads", "group", "head_dim"), [(1, 1, 16), (3, 3, 64), (2, 4, 128), (1, 8, 32)]
)
def test_heads_and_groups(num_kv_heads, group, head_dim):
    assert_right(draw(num_kv_heads=num_kv_heads, group=group, head_dim=head_dim))


@pytest.mark.parametrize(
    ("starts", "lens"),
    [
        ((0,), (1,)),
        ((77,), (1,)),
        ((0,), (70 * LONG,)),
        ((130 * LONG,), (45 * LONG,)),
        ((0, 9, 64, 0), (1, 2, 64, 33 * LONG)),
        (tuple(range(20)), (3,) * 20),
    ],
)
def test_chunks_from_one_token_to_many(starts, lens):
    assert_right(draw(starts=starts, lens=lens))


@pytest.mark.parametrize(
    "config", [PrefillConfig(64, 64, 4, 3), PrefillConfig(32, 32, 4, 2), PrefillConfig(128, 64, 8, 3)]
)
def test_configurations_agree(config):
    chunks = draw(starts=(5, 0, 100), lens=(40, 1, 33 * LONG))
    layout = chunks.layout
    where = (layout.block_tables, layout.cu_seqlens, layout.starts, layout.window_starts)
    assert distance(attend_prefill(*chunks.tensors, *where, config=config), solve_chunks(chunks)) <= 1e-2


def test_a_query_that_is_a_view_of_the_packed_projection():
    chunks = draw()
    q, *pages = chunks.tensors
    packed = torch.cat((q, q), 1)[:, : q.shape[1]]
    assert_right(type(chunks)(chunks.layout, chunks.block_size, (packed, *pages)))


def test_float8_pages_with_a_scale_per_head():
    chunks = draw(num_kv_heads=2)
    q, k_pages, v_pages = chunks.tensors
    pages = [x.to(torch.float8_e4m3fn) for x in (k_pages, v_pages)]
    k_scale, v_scale = (torch.tensor(pair, device=DEVICE) for pair in ((0.5, 1.5), (0.25, 3.0)))
    layout = chunks.layout
    where = (layout.block_tables, layout.cu_seqlens, layout.starts, layout.window_starts)
    found = attend_prefill(
        q, *pages, *where, config=PrefillConfig(64, 64, 4, 3), k_scale=k_scale, v_scale=v_scale
    )
    scaled = (pages[0].double() * k_scale[:, None], pages[1].double() * v_scale[:, None])
    expected = solve_chunks(type(chunks)(layout, chunks.block_size, (q, *scaled)))
    assert distance(found, expected) <= 1e-2


@pytest.mark.parametrize("window_starts", [(0, 64, 3), (17, 130, 0), (5, 1, 64)])
def test_windows_that_begin_after_the_first_position(window_starts):
    assert_right(draw(starts=(17, 130, 64), lens=(9, 1, 33 * LONG), window_starts=window_starts))


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(
    ("starts", "lens"),
    [
        ((0, -60, -60), (9, 50, 0)),
        ((-60, 0, 30, -60, 5), (0, 1, 33 * LONG, 0, 2)),
        ((-60,) * 4 + (40,) + (-60,) * 40, (0,) * 4 + (20,) + (0,) * 40),
        ((-60, -60), (0, 50)),
    ],
)
def test_chunks_of_padding_and_empty_ones_read_nothing(starts, lens, block_size):
    real = [idx for idx, start in enumerate(starts) if start >= 0]
    at = [sum(lens[:idx]) for idx in range(len(lens))]
    chunks = draw(starts=[max(start, 0) for start in starts], lens=lens, block_size=block_size)
    layout, (q, *pages) = chunks.layout, chunks.tensors
    # A page that nobody may read: one step beyond the pages is far outside of all memory.
    tables = layout.block_tables.clone()
    tables[[idx for idx, start in enumerate(starts) if start < 0]] = 1 << 40
    where = (tables, layout.cu_seqlens, torch.tensor(starts, device=DEVICE), layout.window_starts)
    for config in (PrefillConfig(32, 32, 4, 2), PrefillConfig(128, 64, 8, 3)):
        found = attend_prefill(q, *pages, *where, config=config)
        is_real = torch.zeros(len(q), dtype=torch.bool, device=DEVICE)
        for idx in real:
            span = slice(at[idx], at[idx] + lens[idx])
            is_real[span] = True
            alone = PrefillLayout(
                layout.block_tables[idx : idx + 1],
                torch.tensor([0, lens[idx]], device=DEVICE),
                layout.starts[idx : idx + 1],
                layout.window_starts[idx : idx + 1],
                (lens[idx],),
            )
            expected = solve_chunks(type(chunks)(alone, block_size, (q[span], *pages)))
            assert distance(found[span], expected) <= 1e-2
        assert (found[~is_real] == 0).all(), "nothing that was there before is left in padding"


def test_one_key_more_is_noticed():
    chunks = draw(starts=(30,), lens=(20,))
    expected = solve_chunks(chunks)
    chunks.layout.starts[0] = 31
    found = TritonAttention().bind_prefill(chunks.layout, chunks.block_size)(*chunks.tensors)
    assert distance(found, expected) > 1e-2
