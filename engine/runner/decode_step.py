"""The three parts of one decode step on the device: draft, target forward, and verify with commit.

They read nothing on the host and take their sizes from the batch, so `graphs` can capture each and host work
can enter between them. Which rows decode is left to the runner.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend, AttentionLayout
from engine.config import DraftMode
from engine.draft.drafter import DraftNoise, TreeDrafter
from engine.draft.ranks import ranks_at
from engine.kvcache.kv_pool import KVPool, slots_of
from engine.kvcache.tree_scratch import TreeScratch
from engine.layers.rotary import Angles
from engine.model.llama import LlamaForCausalLM
from engine.runner.slot_state import SlotState
from engine.sampling.verify import Verify
from engine.speculation import DraftOutput, SamplingFlags, TreeTensors


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """The rows of one decode step: slots [B] int64 and their trees.

    `align_width` positions reach back to the oldest one whose draft K/V may be missing. The first
    `num_read_blocks` columns of the block tables hold all cached tokens, the first `num_blocks` also what
    this step may write.
    """

    slots: Tensor
    tree: TreeTensors
    flags: SamplingFlags
    align_width: int
    num_read_blocks: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class NodeOutput:
    """What the target says at every node: logits [B, N, V], features [B, N, F] and K/V, in B * N rows."""

    logits: Tensor
    features: Tensor
    scratch: TreeScratch


class DecodeStep:
    """Networks and device memory, wired for decode steps."""

    def __init__(
        self,
        target: LlamaForCausalLM,
        drafter: TreeDrafter | None,
        backend: AttentionBackend,
        pool: KVPool,
        state: SlotState,
        verify: Verify,
        draft_mode: DraftMode,
    ) -> None:
        self._target, self._drafter, self._backend = target, drafter, backend
        self._pool, self._state, self._verify = pool, state, verify
        self._block_size = pool.k.shape[2]
        self._draft_mode = draft_mode

    def draft(self, batch: DecodeBatch) -> DraftOutput:
        """Fill the trees; a batch of roots only does no draft work."""
        if batch.tree.depth == 0 or self._drafter is None:
            return DraftOutput(self._state.root_token[batch.slots][:, None])
        tables = self._state.block_tables[batch.slots, : batch.num_blocks]
        window = self._state.align_window(batch.slots, batch.align_width, tables)
        sampling = self._state.sampling(batch.slots, SamplingFlags())
        noise = DraftNoise(sampling.seed, sampling.temperature)
        return self._drafter.draft(
            window, batch.tree, self._draft_mode, noise, self._target.config.vocab_size
        )

    def run_target(self, batch: DecodeBatch, draft: DraftOutput) -> NodeOutput:
        """Run every node of every tree at once: prefix attention over pages, suffix attention over the
        scratch.
        """
        tree, root_positions = batch.tree, self._state.seq_len[batch.slots]
        shape = (tree.num_rows, tree.num_nodes)
        ends = root_positions[:, None].expand(shape)
        tables = self._state.block_tables[batch.slots, : batch.num_read_blocks]
        layout = AttentionLayout(tables, torch.zeros_like(ends), ends, tree.ancestor_mask())
        attend_pages = self._backend.bind(layout, self._block_size)

        scratch = self._pool.scratch(tree.num_rows * tree.num_nodes)
        ops = self._target.ops

        def attend(layer_idx: int, qkv: Tensor, angles: Angles) -> Tensor:
            q = ops.rope_store(qkv, angles, scratch.k[layer_idx], scratch.v[layer_idx])
            pages = self._pool.k[layer_idx], self._pool.v[layer_idx]
            suffix = scratch.layer(layer_idx, tree.num_rows)
            return attend_pages(q.view(*shape, *q.shape[1:]), *suffix, *pages).flatten(0, 1)

        positions = (root_positions[:, None] + tree.depths).flatten()
        output = self._target(draft.token_ids.clamp(min=0).flatten(), positions, attend)
        logits = self._target.logits(output.hidden).view(*shape, -1)
        # The feature size may be 0, which a view cannot infer.
        return NodeOutput(logits, output.features.view(*shape, output.features.shape[1]), scratch)

    def commit(self, batch: DecodeBatch, draft: DraftOutput, output: NodeOutput) -> Tensor:
        """Verify, move the accepted path from scratch to pages, and advance the rows.

        Returns [B, 2 D + 4] int64: what each row emitted, D + 1 columns padded with -1; its path, as many;
        the draft's rank of its last token; and whether its logits were finite.
        """
        slots, state = batch.slots, self._state
        root_positions = state.seq_len[slots]
        sampling = state.sampling(slots, batch.flags)
        verification = self._verify(output.logits, draft, batch.tree, sampling, root_positions)
        path = verification.path
        step = torch.arange(path.shape[1], device=path.device)
        is_kept = step <= verification.num_accepted[:, None]
        tables = state.block_tables[slots, : batch.num_blocks]
        pool_slots = slots_of(tables, root_positions[:, None] + step, is_kept, self._block_size)
        rows = torch.arange(path.shape[0], device=path.device)[:, None]
        self._pool.commit(
            pool_slots.flatten(), output.scratch, (rows * batch.tree.num_nodes + path).flatten()
        )
        state.commit(slots, verification, output.features[rows, path], sampling.is_penalized)
        last = path.gather(1, verification.num_accepted[:, None])[:, 0]
        columns = (ranks_at(draft, last, verification.next_token), verification.is_finite.long())
        return torch.cat((verification.token_ids, path, torch.stack(columns, dim=1)), dim=1)
