"""The plan of tree attention covers every key of every row once, whatever the lengths and the GPU."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels.tree_attention_config import TreeConfig
from engine.kernels.tree_attention_plan import make_plan

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = TreeConfig(16, 64, 4, 4, None, num_slots=33, min_tiles=2, idle_percent=55)
TILE = CONFIG.block_n


def plan_of(starts, ends, num_suffix=5, config=CONFIG, limit=1 << 20):
    """Return (units, cuts) as lists of lists; windows [B] shared by the row's two nodes."""
    starts, ends = (torch.tensor(x, device=DEVICE)[:, None].expand(-1, 2) for x in (starts, ends))
    mask = torch.ones(len(starts), 2, num_suffix, dtype=torch.bool, device=DEVICE)
    words = make_plan(starts, ends, mask, config=config, limit=limit).words.tolist()
    num_units = config.max_units(len(starts))
    units = [words[8 + 8 * i : 16 + 8 * i] for i in range(num_units)]
    cuts = words[8 + 8 * num_units :]
    return [unit for unit in units if unit[0] >= 0], [cuts[4 * i : 4 * i + 3] for i in range(words[0])]


def lengths(kind, num_rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if kind == "equal":
        return [8192] * num_rows
    if kind == "empty":
        return [0] * num_rows
    draws = torch.rand(num_rows, generator=generator)
    return [int(131072 * draw**6) for draw in draws]


@pytest.mark.parametrize("num_rows", [1, 2, 7, 16, 64, 100])
@pytest.mark.parametrize("kind", ["equal", "empty", "ragged"])
@pytest.mark.parametrize("num_slots", [1, 8, 33, 264])
def test_units_cover_each_row_once(kind, num_rows, num_slots):
    ends = lengths(kind, num_rows)
    config = replace(CONFIG, num_slots=num_slots)
    units, cuts = plan_of([0] * num_rows, ends, config=config)
    for row, length in enumerate(ends):
        spans = [unit[1:3] for unit in units if unit[0] == row]
        suffix = -(-length // TILE) * TILE
        assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])]
        assert spans[-1][1] == suffix + TILE
        assert all(begin < end for begin, end in spans)
        assert all(unit[3:7] == [length, suffix, 0, length] for unit in units if unit[0] == row)
        assert len(spans) == 1 or max(end - begin for begin, end in spans) >= config.min_tiles * TILE
        pieces = [unit[7] for unit in units if unit[0] == row]
        own = [cut for cut in cuts if cut[0] == row]
        if len(spans) == 1:
            assert pieces == [-1]
            assert not own
        else:
            assert own == [[row, pieces[0], len(pieces)]]
            assert pieces == list(range(pieces[0], pieces[0] + len(pieces)))
            assert pieces == [i for i, unit in enumerate(units) if unit[0] == row]
    assert len(cuts) <= config.max_cuts(num_rows)


def test_a_long_row_among_short_ones_is_shared_by_the_whole_gpu():
    units, _ = plan_of([0] * 64, [1024] * 63 + [131072])
    largest = max(end - begin for _, begin, end, *_ in units)
    assert largest <= 2 * (63 * 1024 + 131072) / CONFIG.num_slots


def test_equal_rows_that_fill_the_gpu_stay_whole():
    units, cuts = plan_of([0] * 64, [8192] * 64)
    assert len(units) == 64
    assert not cuts


def test_windows_begin_at_whole_tiles_and_end_at_the_limit():
    units, _ = plan_of([70, 0, 500], [200, 0, 400], limit=150, config=replace(CONFIG, num_slots=1))
    assert [unit[:6] for unit in units] == [
        [0, 64, 256, 150, 192, 70],
        [1, 0, 64, 0, 0, 0],
        [2, 0, 64, 0, 0, 500],
    ]


def test_a_suffix_may_take_several_tiles():
    units, _ = plan_of([0], [64], num_suffix=2 * TILE + 1, config=replace(CONFIG, num_slots=1))
    assert [unit[1:3] for unit in units] == [[0, 4 * TILE]]
