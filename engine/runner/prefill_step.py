"""Prefill on the device: the chunks of a step, side by side in one pass; nothing is sampled.

Which chunks run is decided by the scheduler; attention over pages is left to the backend.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend, PrefillLayout
from engine.batch import PrefillChunk
from engine.draft.drafter import PromptPairs, TreeDrafter
from engine.kvcache.kv_pool import KVPool, slots_of
from engine.layers.rotary import Angles
from engine.model.llama import LlamaForCausalLM
from engine.runner.slot_state import SlotState
from engine.speculation import upload


class PrefillStep:
    """Networks and device memory, wired for prefill."""

    def __init__(
        self,
        target: LlamaForCausalLM,
        drafter: TreeDrafter | None,
        backend: AttentionBackend,
        pool: KVPool,
        state: SlotState,
    ) -> None:
        self._target, self._drafter, self._backend = target, drafter, backend
        self._pool, self._state = pool, state
        self._block_size = pool.k.shape[2]
        self._device = pool.k.device

    def run(self, chunks: tuple[PrefillChunk, ...]) -> Tensor:
        """Cache the K/V of every chunk; return which of them are finite, [C] bool."""
        lens = tuple(len(chunk.token_ids) for chunk in chunks)
        token_ids = self._tensor([token for chunk in chunks for token in chunk.token_ids])
        positions = self._tensor([chunk.start + i for chunk in chunks for i in range(len(chunk.token_ids))])
        starts = self._tensor([chunk.start for chunk in chunks])
        layout = self._layout(chunks, lens, starts, torch.zeros_like(starts))
        slots = self._pool_slots(chunks, lens, layout, positions)
        attend_chunks = self._backend.bind_prefill(layout, self._block_size)
        ops = self._target.ops

        def attend(layer_idx: int, qkv: Tensor, angles: Angles) -> Tensor:
            q = ops.rope_store(qkv, angles, *self._pool.rows(layer_idx), slots)
            return attend_chunks(q, *self._pool.layers[layer_idx])

        output = self._target(token_ids, positions, attend)
        if self._drafter is not None:
            self._drafter.fill(self._pairs(chunks, lens, output.features))
        self._state.note_prefill(chunks, token_ids, output.features)
        return _all_finite(output.hidden, layout.cu_seqlens)

    def _pairs(
        self, chunks: tuple[PrefillChunk, ...], lens: tuple[int, ...], features: Tensor
    ) -> PromptPairs:
        """Return the pairs that the chunks complete: those of their own tokens and of the token after each.

        The first pair of a chunk takes the feature kept before it, which is zero at position 0.
        """
        num_tokens = features.shape[0]
        lens = tuple(size + 1 for size in lens)
        token_ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        for idx, (chunk, size) in enumerate(zip(chunks, lens, strict=True)):
            first = len(token_ids) - idx
            token_ids += [*chunk.token_ids, chunk.next_token_id]
            positions += range(chunk.start, chunk.start + size)
            rows += [num_tokens + idx, *range(first, first + size - 1)]
        numbers = self._tensor([*token_ids, *positions, *rows]).view(3, -1)
        slots = self._tensor([chunk.slot for chunk in chunks])
        starts = self._tensor([chunk.start for chunk in chunks])
        before = self._state.tables.features[slots, (starts - 1) % self._state.tables.window]
        layout = self._layout(chunks, lens, starts, self._state.tables.draft_start[slots])
        return PromptPairs(
            token_ids=numbers[0],
            positions=numbers[1],
            features=torch.cat((features, before))[numbers[2]],
            slots=self._pool_slots(chunks, lens, layout, numbers[1]),
            layout=layout,
        )

    def _layout(
        self, chunks: tuple[PrefillChunk, ...], lens: tuple[int, ...], starts: Tensor, window_starts: Tensor
    ) -> PrefillLayout:
        slots = self._tensor([chunk.slot for chunk in chunks])
        last = max(chunk.start + size for chunk, size in zip(chunks, lens, strict=True))
        num_blocks = min(-(-last // self._block_size), self._state.tables.block_tables.shape[1])
        return PrefillLayout(
            block_tables=self._state.tables.block_tables[slots, :num_blocks],
            cu_seqlens=self._tensor([0, *itertools.accumulate(lens)]),
            starts=starts,
            window_starts=window_starts,
            chunk_lens=lens,
        )

    def _pool_slots(
        self,
        chunks: tuple[PrefillChunk, ...],
        lens: tuple[int, ...],
        layout: PrefillLayout,
        positions: Tensor,
    ) -> Tensor:
        """Return the pool slot of each position [T]: the dummy's where the block is shared."""
        owners = [idx for idx, size in enumerate(lens) for _ in range(size)]
        store_from = [chunk.store_from for chunk, size in zip(chunks, lens, strict=True) for _ in range(size)]
        numbers = self._tensor(owners + store_from).view(2, -1)
        tables = layout.block_tables[numbers[0]]
        is_stored = (positions >= numbers[1])[:, None]
        return slots_of(tables, positions[:, None], is_stored, self._block_size).flatten()

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return upload(values, torch.int64, self._device)


def _all_finite(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return [C] bool: is every row of hidden [T, H] from cu_seqlens[c] to the next finite?"""
    num_bad = (~hidden.isfinite().all(1)).cumsum(0)
    before = torch.cat((torch.zeros_like(num_bad[:1]), num_bad))[cu_seqlens]
    return before[1:] == before[:-1]
