"""A prefill padded to a larger shape leaves what the exact one does, and nothing anywhere else."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from engine.attention.cpu import CpuAttention
from engine.batch import PrefillChunk
from engine.kvcache.kv_pool import KVPool
from engine.runner.packed_chunks import PackedChunks, PrefillShape
from engine.runner.prefill_step import PrefillStep
from engine.step_rows import SlotTables
from tests.exactness.head import build_drafter
from tests.exactness.tiny import VOCAB, EngineShape, build_engine, build_target
from tests.runner.prefill_cases import DeviceReference

TARGET = build_target()
BLOCK_SIZE, WINDOW, NUM_SLOTS, TABLE_WIDTH = 4, 16, 8, 20
CPU = torch.device("cpu")
# (slot, start, tokens, first position that is stored) of each chunk of a step.
CASES = {
    "one": [(3, 0, 11, 0)],
    "one token": [(3, 0, 1, 0)],
    "longer than a ring": [(2, 0, 40, 0)],
    "a second chunk": [(2, 21, 33, 21)],
    "a prefix hit": [(4, 11, 6, 12)],
    "many": [(1, 0, 1, 0), (5, 19, 20, 20), (2, 0, 17, 0), (7, 64, 3, 64), (4, 7, 1, 8)],
}
SHAPES = [PrefillShape(64, 9), PrefillShape(128, 65), PrefillShape(96, 6)]


@dataclass
class Memory:
    """All that a prefill may write, full of random numbers before."""

    step: PrefillStep
    pools: tuple[KVPool, ...]
    tables: SlotTables

    @staticmethod
    def make(backend) -> "Memory":
        shape = EngineShape(
            block_size=BLOCK_SIZE, num_blocks=NUM_SLOTS * TABLE_WIDTH, max_num_seqs=NUM_SLOTS - 1
        )
        drafter = build_drafter(shape, TARGET, backend)
        runner = build_engine(TARGET, drafter, shape, backend=backend)._runner
        generator = torch.Generator().manual_seed(0)
        for pool in runner.page_pools:
            pool.k.normal_(generator=generator)
            pool.v.normal_(generator=generator)
        tables = runner._state.tables
        tables.features.normal_(generator=generator)
        blocks = 1 + torch.randperm(NUM_SLOTS * TABLE_WIDTH, generator=generator).view(NUM_SLOTS, -1)
        tables.block_tables[1:, :TABLE_WIDTH] = blocks[1:]
        tables.draft_start[:] = torch.tensor([0, 0, 5, 1, 0, 3, 0, 0])
        return Memory(runner.prefill._step, runner.page_pools, tables)

    def block(self, slot: int, position: int) -> int:
        return int(self.tables.block_tables[slot, position // BLOCK_SIZE])


def chunks_of(name):
    return tuple(
        PrefillChunk(slot, start, tuple((7 * slot + i) % VOCAB for i in range(size)), 5 + slot, store_from)
        for slot, start, size, store_from in CASES[name]
    )


@torch.inference_mode()
def run_packed(memory, packed):
    output = memory.step.run_target(packed)
    memory.step.fill_draft(packed, output)
    return output.prefilled


def assert_near(found, right):
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_padding_changes_nothing(name, shape):
    chunks, exact, padded = chunks_of(name), Memory.make(DeviceReference()), Memory.make(DeviceReference())
    right = run_packed(exact, PackedChunks.exact(chunks, CPU))
    found = run_packed(padded, PackedChunks.padded(chunks, shape, CPU))
    num_tokens, num_chunks = PrefillShape.of(chunks)
    assert_near(found.hidden[:num_tokens], right.hidden)
    assert found.is_finite.shape == (shape.num_chunks,)
    assert found.is_finite[:num_chunks].all()
    assert right.is_finite.all()
    for mine, theirs in zip(padded.pools, exact.pools, strict=True):
        assert_near(mine.k[:, 1:], theirs.k[:, 1:])
        assert_near(mine.v[:, 1:], theirs.v[:, 1:])
    assert torch.equal(padded.tables.tokens[:, :-1], exact.tables.tokens[:, :-1])
    assert_near(padded.tables.features[:, :-1], exact.tables.features[:, :-1])


@pytest.mark.parametrize("name", CASES)
def test_only_blocks_and_ring_places_of_the_chunks_are_written(name):
    before, memory = Memory.make(DeviceReference()), Memory.make(DeviceReference())
    run_packed(memory, PackedChunks.padded(chunks_of(name), SHAPES[1], CPU))
    for pool, other, num_more in zip(memory.pools, before.pools, (0, 1), strict=True):
        own = {
            memory.block(slot, position)
            for slot, start, size, store_from in CASES[name]
            for position in range(max(start, store_from), start + size + num_more)
        }
        is_same = (pool.k == other.k).flatten(2).all(2).all(0) & (pool.v == other.v).flatten(2).all(2).all(0)
        assert {idx for idx, same in enumerate(is_same.tolist()) if not same} - {0} == own
    kept = {
        (slot, position % WINDOW)
        for slot, start, size, _ in CASES[name]
        for position in range(start + max(0, size - WINDOW), start + size)
    }
    is_same = (memory.tables.features == before.tables.features).all(2)[:, :WINDOW]
    assert {tuple(place) for place in (~is_same).nonzero().tolist()} == kept


def test_networks_see_positions_that_they_know_and_chunks_the_feature_before_them():
    memory, chunks = Memory.make(DeviceReference()), chunks_of("a second chunk")
    before = memory.tables.features[2, 20 % WINDOW].clone()
    packed, seen = PackedChunks.padded(chunks, SHAPES[0], CPU), []
    hook = TARGET.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    fill = memory.step._drafter.fill
    memory.step._drafter.fill = lambda pairs: seen.append(pairs.positions) or fill(pairs)
    with torch.inference_mode():
        output = memory.step.run_target(packed)
        memory.step.fill_draft(packed, output)
    hook.remove()
    assert torch.equal(output.before[0], before)
    assert not torch.equal(memory.tables.features[2, 20 % WINDOW], before), "the chunk is longer than a ring"
    assert [positions.tolist() for positions in seen] == [
        [*range(21, 54), *[0] * 31],
        [*range(21, 55), *[0] * (31 + 8)],
    ]


@pytest.mark.parametrize("name", CASES)
def test_the_draft_pairs_each_token_with_the_feature_of_the_position_before_it(name):
    memory, chunks, filled = Memory.make(DeviceReference()), chunks_of(name), []
    memory.step._drafter.fill = filled.append
    packed = PackedChunks.padded(chunks, SHAPES[1], CPU)
    kept = [memory.tables.features[chunk.slot, (chunk.start - 1) % WINDOW].clone() for chunk in chunks]
    with torch.inference_mode():
        output = memory.step.run_target(packed)
        memory.step.fill_draft(packed, output)
    (pairs,), first, end = filled, 0, 0
    for chunk, before in zip(chunks, kept, strict=True):
        size = len(chunk.token_ids)
        span, first = slice(first, first + size + 1), first + size + 1
        begin, end = end, end + size
        assert pairs.token_ids[span].tolist() == [*chunk.token_ids, chunk.next_token_id]
        assert pairs.positions[span].tolist() == [*range(chunk.start, chunk.start + size + 1)]
        assert torch.equal(pairs.features[span], torch.cat((before[None], output.features[begin:end])))
    assert (pairs.slots[first:] == 0).all()


@pytest.mark.parametrize("name", CASES)
def test_a_backend_that_cuts_chunks_on_the_host_leaves_the_same(name):
    chunks, exact, cut = chunks_of(name), Memory.make(DeviceReference()), Memory.make(CpuAttention())
    run_packed(exact, PackedChunks.exact(chunks, CPU))
    with torch.inference_mode():
        assert cut.step.run(chunks).is_finite.tolist() == [True] * len(chunks)
    for mine, theirs in zip(cut.pools, exact.pools, strict=True):
        assert_near(mine.k[:, 1:], theirs.k[:, 1:])
    assert not cut.step.is_capturable


@pytest.mark.parametrize("backend", [DeviceReference(), CpuAttention()], ids=["device", "host"])
def test_what_is_captured_reads_nothing_on_the_host(backend):
    memory, packed = Memory.make(backend), PackedChunks.exact(chunks_of("many"), CPU)
    # Tensors without contents: whatever reads one raises.
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        packed = replace(packed, values=mode.from_tensor(packed.values))
        if not memory.step.is_capturable:
            with pytest.raises(DataDependentOutputException):
                memory.step.run_target(packed)
            return
        held = memory.step.room(packed.shape)
        held.copy_(memory.step.run_target(packed))
        memory.step.fill_draft(packed, held)


def test_a_chunk_that_is_not_finite_is_told_from_its_neighbours():
    memory = Memory.make(DeviceReference())
    # What a slot reads of its prefix alone may break it.
    memory.pools[0].v[0, memory.block(5, 0)] = torch.nan
    packed = PackedChunks.padded(chunks_of("many"), SHAPES[0], CPU)
    found = run_packed(memory, packed)
    assert found.is_finite.tolist() == [True, False] + [True] * 7


def test_other_chunks_take_the_place_of_those_before():
    first, second = chunks_of("many"), chunks_of("a second chunk")
    packed = PackedChunks.padded(first, SHAPES[0], CPU)
    packed.copy_(second)
    again = PackedChunks.padded(second, SHAPES[0], CPU)
    assert torch.equal(packed.values, again.values)
    assert packed.cu_seqlens.tolist() == [0, 33] + [64] * 8
    assert packed.slots.tolist() == [2] + [0] * 8
    assert packed.store_from.tolist() == [21] + [0] * 8
    assert packed.text.tolist() == [*second[0].token_ids, second[0].next_token_id, *[0] * (31 + 8)]
    assert packed.starts[0] == 21
    assert (packed.starts[1:] <= -64).all()


@pytest.mark.parametrize("num_chunks", [1, 2, 8, 9, 65])
def test_rows_begin_where_16_divides_their_address(num_chunks):
    packed = PackedChunks.padded((), PrefillShape(num_chunks, num_chunks), CPU)
    for row in (packed.cu_seqlens, packed.slots, packed.starts, packed.store_from, packed.text):
        assert row.storage_offset() * row.element_size() % 16 == 0
