import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ModelLoadError
from engine.training.dataset import (
    ShardWriter,
    batch_indices,
    content_keys,
    load_conversations,
    pack,
    shard_paths,
    split_held_out,
)
from tests.training.cases import conversations


def write(folder, data, shard_size=20):
    with ShardWriter(folder, shard_size) as writer:
        for token_ids, is_answer in data:
            writer.add(token_ids, is_answer)


def test_conversations_survive_the_disk_in_order(tmp_path):
    data = conversations([7, 12, 3, 30, 1])
    write(tmp_path, data)
    loaded = load_conversations(tmp_path)
    assert len(shard_paths(tmp_path)) == 3
    for name in ("token_ids", "is_answer", "lengths"):
        assert torch.equal(getattr(loaded, name), getattr(data, name))


def test_a_later_writer_goes_on_after_the_shards_it_finds(tmp_path):
    first, second = conversations([7, 5]), conversations([4, 9], seed=1)
    write(tmp_path, first)
    write(tmp_path, second)
    loaded = load_conversations(tmp_path)
    assert loaded.token_ids.tolist() == first.token_ids.tolist() + second.token_ids.tolist()


def test_an_interrupted_writer_loses_only_its_open_shard(tmp_path):
    writer = ShardWriter(tmp_path, shard_size=10)
    for token_ids, is_answer in conversations([6, 6, 6]):
        writer.add(token_ids, is_answer)
    del writer
    assert load_conversations(tmp_path).lengths.tolist() == [6, 6]


@pytest.mark.parametrize("damage", ["empty", "truncated"])
def test_a_missing_or_damaged_store_is_a_clear_error(tmp_path, damage):
    if damage == "truncated":
        write(tmp_path, conversations([9, 9]))
        path = shard_paths(tmp_path)[0]
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelLoadError):
        load_conversations(tmp_path)


def test_the_held_out_side_depends_on_content_alone():
    data = conversations([5 + idx % 7 for idx in range(400)])
    train, held_out = split_held_out(data, 0.25)
    assert train.num_conversations + held_out.num_conversations == 400
    assert 60 <= held_out.num_conversations <= 140
    order = torch.randperm(400, generator=torch.Generator().manual_seed(1))
    parts = list(data)
    token_ids, is_answer = zip(*[parts[idx] for idx in order.tolist()], strict=True)
    shuffled = type(data)(torch.cat(token_ids), torch.cat(is_answer), data.lengths[order])
    _, again = split_held_out(shuffled, 0.25)
    assert sorted(ids.tolist() for ids, _ in again) == sorted(ids.tolist() for ids, _ in held_out)


def test_content_keys_see_order_and_length():
    data = conversations([3, 3, 4])
    data.token_ids[:] = torch.tensor([5, 6, 7, 6, 5, 7, 5, 6, 7, 7])
    assert content_keys(data).unique().numel() == 3


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_packing_places_every_token_once_and_in_order(lengths):
    row_length = 24
    data = conversations(lengths)
    rows = pack(data, row_length)
    starts = [*(rows.positions == 0).flatten().nonzero()[:, 0].tolist(), rows.positions.numel()]
    flat_ids, flat_answers = rows.token_ids.flatten(), rows.is_answer.flatten()
    found = [
        (flat_ids[start:end].tolist(), flat_answers[start:end].tolist())
        for start, end in itertools.pairwise(starts)
    ]
    paddings = [document for document in found if not any(document[0]) and not any(document[1])]
    expected = [(ids[:row_length].tolist(), answer[:row_length].tolist()) for ids, answer in data]
    assert sorted(found) == sorted(expected + paddings)
    assert len(paddings) <= rows.num_rows
    assert rows.positions.max() < row_length


def test_packing_wastes_less_than_a_row_where_lengths_fit():
    rows = pack(conversations([5, 7, 3, 9, 1, 11, 6, 6]), 12)
    assert rows.num_rows == 4


def test_every_epoch_shows_every_row_once_in_a_new_order():
    epochs = [[batch_indices(12, 3, 7, 4 * epoch + step).tolist() for step in range(4)] for epoch in (0, 1)]
    assert all(sorted(row for batch in epoch for row in batch) == list(range(12)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert batch_indices(12, 3, 7, 5).tolist() == epochs[1][1]
