"""Prefill on the device: the chunks of a step, side by side in one pass; nothing is sampled.

Which chunks run is decided by the scheduler; attention over pages is left to the backend.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend, PrefillLayout
from engine.batch import PrefillChunk
from engine.draft.drafter import PromptPairs, TreeDrafter
from engine.kvcache.kv_pool import KVPool, slots_of
from engine.layers.rotary import Angles
from engine.model.llama import LlamaForCausalLM
from engine.runner.slot_state import SlotState
from engine.runner.step_output import PrefilledChunks
from engine.speculation import upload


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Where C chunks stand, each [C] int64: slots, starts, and from which position on K/V are stored."""

    slots: Tensor
    starts: Tensor
    store_from: Tensor
    lens: tuple[int, ...]
    num_blocks: int  # that the longest reads


@dataclass(frozen=True, slots=True)
class _Tokens:
    """T tokens of chunks side by side, each [T] int64: the chunk of each, its position, its pool slot."""

    owners: Tensor
    positions: Tensor
    pool_slots: Tensor
    layout: PrefillLayout


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

    def run(self, chunks: tuple[PrefillChunk, ...]) -> PrefilledChunks:
        """Cache the K/V of every chunk."""
        # Of a token the host sends its id alone: what follows from its chunk the device works out.
        text = self._tensor([token for chunk in chunks for token in (*chunk.token_ids, chunk.next_token_id)])
        where = self._place(chunks)
        tokens = self._spread(where, 0, torch.zeros_like(where.starts))
        token_ids = text[torch.arange(sum(where.lens), device=self._device) + tokens.owners]
        attend_chunks = self._backend.bind_prefill(tokens.layout, self._block_size)
        ops = self._target.ops

        def attend(layer_idx: int, qkv: Tensor, angles: Angles) -> Tensor:
            q = ops.rope_store(qkv, angles, *self._pool.rows(layer_idx), tokens.pool_slots)
            return attend_chunks(q, *self._pool.layers[layer_idx])

        output = self._target(token_ids, tokens.positions, attend)
        if self._drafter is not None:
            self._drafter.fill(self._pairs(where, text, output.features))
        self._state.note_prefill(chunks, token_ids, output.features)
        return PrefilledChunks(_all_finite(output.hidden, tokens.layout.cu_seqlens), output.hidden)

    def _pairs(self, where: _Chunks, text: Tensor, features: Tensor) -> PromptPairs:
        """Return the pairs that the chunks complete: those of their own tokens and of the token after each.

        The first pair of a chunk takes the feature kept before it, which is zero at position 0.
        """
        num_tokens, tables = features.shape[0], self._state.tables
        pairs = self._spread(where, 1, tables.draft_start[where.slots])
        before = tables.features[where.slots, (where.starts - 1) % tables.window]
        rows = torch.arange(text.shape[0], device=self._device) - pairs.owners - 1
        is_first = pairs.positions == where.starts[pairs.owners]
        return PromptPairs(
            token_ids=text,
            positions=pairs.positions,
            features=torch.cat((features, before))[torch.where(is_first, num_tokens + pairs.owners, rows)],
            slots=pairs.pool_slots,
            layout=pairs.layout,
        )

    def _place(self, chunks: tuple[PrefillChunk, ...]) -> _Chunks:
        columns = ([chunk.slot for chunk in chunks], [chunk.start for chunk in chunks])
        numbers = self._tensor([*columns[0], *columns[1], *(chunk.store_from for chunk in chunks)])
        slots, starts, store_from = numbers.view(3, -1)
        last = max(chunk.start + len(chunk.token_ids) for chunk in chunks)
        num_blocks = min(-(-(last + 1) // self._block_size), self._state.tables.block_tables.shape[1])
        return _Chunks(slots, starts, store_from, tuple(len(chunk.token_ids) for chunk in chunks), num_blocks)

    def _spread(self, where: _Chunks, num_more: int, window_starts: Tensor) -> _Tokens:
        """Return the tokens of the chunks, each with `num_more` behind it."""
        lens = tuple(size + num_more for size in where.lens)
        cu_seqlens, num_tokens = self._tensor([0, *itertools.accumulate(lens)]), sum(lens)
        owners = torch.repeat_interleave(cu_seqlens.diff(), output_size=num_tokens)
        offsets = torch.arange(num_tokens, device=self._device) - cu_seqlens[owners]
        positions = where.starts[owners] + offsets
        tables = self._state.tables.block_tables[where.slots, : where.num_blocks]
        # The dummy's slot where the block is shared.
        is_stored = (positions >= where.store_from[owners])[:, None]
        pool_slots = slots_of(tables[owners], positions[:, None], is_stored, self._block_size).flatten()
        layout = PrefillLayout(tables, cu_seqlens, where.starts, window_starts, lens)
        return _Tokens(owners, positions, pool_slots, layout)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return upload(values, torch.int64, self._device)


def _all_finite(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return [C] bool: is every row of hidden [T, H] from cu_seqlens[c] to the next finite?"""
    num_bad = (~hidden.isfinite().all(1)).cumsum(0)
    before = torch.cat((torch.zeros_like(num_bad[:1]), num_bad))[cu_seqlens]
    return before[1:] == before[:-1]
