"""The two parts of a prefill on the device: target forward and draft fill; nothing is sampled.

They read nothing on the host and take their sizes from the chunks' shape, so `prefill_graphs` can capture
each. Which chunks run is decided by the scheduler; attention over pages is left to the backend.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend, PrefillLayout
from engine.batch import PrefillChunk
from engine.draft.drafter import PromptPairs, TreeDrafter
from engine.kvcache.kv_pool import KVPool
from engine.layers.rotary import Angles
from engine.model.llama import LlamaForCausalLM
from engine.runner.packed_chunks import PackedChunks, PrefillShape
from engine.runner.slot_state import SlotState
from engine.runner.step_output import PrefilledChunks


@dataclass(frozen=True, slots=True)
class ChunkOutput:
    """What the target says of C chunks of T tokens: `prefilled`, and the features [T, F]. before: [C, F], the
    feature kept ahead of each chunk, which is zero at position 0.
    """

    prefilled: PrefilledChunks
    features: Tensor
    before: Tensor

    def first(self, shape: PrefillShape) -> "ChunkOutput":
        """Return the rows of a smaller shape, without a copy."""
        num_tokens, num_chunks = shape
        prefilled = PrefilledChunks(self.prefilled.is_finite[:num_chunks], self.prefilled.hidden[:num_tokens])
        return ChunkOutput(prefilled, self.features[:num_tokens], self.before[:num_chunks])

    def copy_(self, other: "ChunkOutput") -> None:
        """Take over what `other` says of as many chunks and tokens."""
        self.prefilled.is_finite.copy_(other.prefilled.is_finite)
        self.prefilled.hidden.copy_(other.prefilled.hidden)
        self.features.copy_(other.features)
        self.before.copy_(other.before)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """T tokens of chunks side by side, each [T] int64: the chunk of each, its place there, its position, its
    pool slot.
    """

    owners: Tensor
    offsets: Tensor
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
        self.device = pool.k.device

    @property
    def is_capturable(self) -> bool:
        """True where the parts read nothing on the host, given chunks that are padded."""
        return self._backend.is_prefill_capturable

    @property
    def has_draft(self) -> bool:
        """True where `fill_draft` has something to do."""
        return self._drafter is not None

    @property
    def num_weights(self) -> int:
        """How many numbers a token is multiplied with."""
        layers = self._target.layers
        return sum(values.numel() for values in (*layers.parameters(), *layers.buffers()))

    def room(self, shape: PrefillShape) -> ChunkOutput:
        """Return room for what the target says of chunks of `shape`."""
        weight, rings = self._target.embed_tokens.weight, self._state.tables.features
        prefilled = PrefilledChunks(
            weight.new_empty(shape.num_chunks, dtype=torch.bool),
            weight.new_empty(shape.num_tokens, weight.shape[1]),
        )
        size = rings.shape[2]
        return ChunkOutput(
            prefilled, rings.new_empty(shape.num_tokens, size), rings.new_empty(shape.num_chunks, size)
        )

    def run(self, chunks: tuple[PrefillChunk, ...]) -> PrefilledChunks:
        """Cache the K/V of every chunk."""
        packed = PackedChunks.exact(chunks, self.device)
        output = self.run_target(packed)
        self.fill_draft(packed, output)
        return output.prefilled

    def run_target(self, packed: PackedChunks) -> ChunkOutput:
        """Cache the target's K/V of every chunk, and keep its last features."""
        tables = self._state.tables
        # Read first: the ring of a long chunk comes round.
        before = tables.features[packed.slots, (packed.starts - 1) % tables.window]
        tokens = self._spread(packed, 0, torch.zeros_like(packed.starts))
        token_ids = packed.text[torch.arange(packed.shape.num_tokens, device=self.device) + tokens.owners]
        attend_chunks = self._backend.bind_prefill(tokens.layout, self._block_size)
        ops = self._target.ops

        def attend(layer_idx: int, qkv: Tensor, angles: Angles) -> Tensor:
            q = ops.rope_store(qkv, angles, *self._pool.rows(layer_idx), tokens.pool_slots)
            return attend_chunks(q, *self._pool.layers[layer_idx])

        output = self._target(token_ids, tokens.positions, attend)
        self._state.note_prefill(packed.slots, packed.starts, packed.cu_seqlens, token_ids, output.features)
        prefilled = PrefilledChunks(_all_finite(output.hidden, packed.cu_seqlens), output.hidden)
        return ChunkOutput(prefilled, output.features, before)

    def fill_draft(self, packed: PackedChunks, output: ChunkOutput) -> None:
        """Cache the draft's K/V of the pairs that the chunks complete: those of their own tokens and of the
        token after each. The first pair of a chunk takes the feature kept before it.
        """
        if self._drafter is None:
            return
        num_tokens = packed.shape.num_tokens
        pairs = self._spread(packed, 1, self._state.tables.draft_start[packed.slots])
        rows = torch.arange(packed.text.shape[0], device=self.device) - pairs.owners - 1
        rows = torch.where(pairs.offsets == 0, num_tokens + pairs.owners, rows)
        filled = PromptPairs(
            token_ids=packed.text,
            positions=pairs.positions,
            features=torch.cat((output.features, output.before))[rows],
            slots=pairs.pool_slots,
            layout=pairs.layout,
        )
        self._drafter.fill(filled)

    def _spread(self, packed: PackedChunks, num_more: int, window_starts: Tensor) -> _Tokens:
        """Return the tokens of the chunks, each with `num_more` behind it."""
        num_tokens, num_chunks = packed.shape
        num_tokens += num_more * num_chunks
        cu_seqlens = packed.cu_seqlens + num_more * torch.arange(num_chunks + 1, device=self.device)
        owners = torch.repeat_interleave(cu_seqlens.diff(), output_size=num_tokens)
        offsets = torch.arange(num_tokens, device=self.device) - cu_seqlens[owners]
        positions = packed.starts[owners] + offsets
        is_stored = positions >= packed.store_from[owners]
        # No network knows the positions of padding.
        positions = positions.clamp(min=0)
        tables = self._state.tables.block_tables
        columns = (positions // self._block_size).clamp(max=tables.shape[1] - 1)
        blocks = tables[packed.slots[owners], columns]
        # The dummy's slot where the block is shared.
        pool_slots = torch.where(is_stored, blocks * self._block_size + positions % self._block_size, 0)
        lens = packed.chunk_lens and tuple(size + num_more for size in packed.chunk_lens)
        layout = PrefillLayout(tables[packed.slots], cu_seqlens, packed.starts, window_starts, lens)
        return _Tokens(owners, offsets, positions, pool_slots, layout)


def _all_finite(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return [C] bool: is every row of hidden [T, H] from cu_seqlens[c] to the next finite?"""
    num_bad = (~hidden.isfinite().all(1)).cumsum(0)
    before = torch.cat((torch.zeros_like(num_bad[:1]), num_bad))[cu_seqlens]
    return before[1:] == before[:-1]
