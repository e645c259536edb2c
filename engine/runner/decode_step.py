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
from engine.kvcache.kv_pool import KVPool
from engine.kvcache.tree_scratch import TreeScratch
from engine.layers.rotary import Angles
from engine.model.llama import LlamaForCausalLM
from engine.runner.slot_state import SlotState
from engine.sampling.verify import Verify
from engine.speculation import SamplingFlags, TreeTensors
from engine.step_rows import StepRows


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
        self._zero = torch.zeros(1, dtype=torch.int64, device=pool.k.device)

    def room(self, batch: DecodeBatch) -> StepRows:
        """Return room for what the parts of a step hand on to each other."""
        probs_size = None
        if self._draft_mode == "sampled" and batch.tree.depth > 0:
            probs_size = self._target.config.vocab_size
        return StepRows.empty(batch.tree, batch.num_blocks, probs_size)

    def draft(self, batch: DecodeBatch, rows: StepRows) -> None:
        """Open the rows and fill the trees; a batch of roots only does no draft work."""
        if batch.tree.depth == 0 or self._drafter is None:
            self._state.open(batch.slots, batch.tree, rows)
            return
        window = self._state.align(batch.slots, batch.tree, rows, batch.align_width)
        sampling = self._state.sampling(batch.slots, rows, SamplingFlags())
        noise = DraftNoise(sampling.seed, sampling.temperature)
        self._drafter.draft(window, batch.tree, noise, rows.draft)

    def run_target(self, batch: DecodeBatch, rows: StepRows) -> NodeOutput:
        """Run every node of every tree at once: prefix attention over pages, suffix attention over the
        scratch.
        """
        tree = batch.tree
        shape = (tree.num_rows, tree.num_nodes)
        layout = AttentionLayout(
            block_tables=rows.block_tables[:, : batch.num_read_blocks],
            prefix_start=self._zero.expand(shape),
            prefix_end=rows.root_positions[:, None].expand(shape),
            suffix_mask=tree.ancestor_mask,
        )
        attend_pages = self._backend.bind(layout, self._block_size)

        scratch = self._pool.scratch(tree.num_rows * tree.num_nodes)
        layers = scratch.layers(tree.num_rows)
        ops = self._target.ops

        def attend(layer_idx: int, qkv: Tensor, angles: Angles) -> Tensor:
            k_dest, v_dest, k, v = layers[layer_idx]
            q = ops.rope_store(qkv, angles, k_dest, v_dest)
            q = q.view(*shape, *q.shape[1:])
            return attend_pages(q, k, v, *self._pool.layers[layer_idx]).flatten(0, 1)

        output = self._target(rows.draft.token_ids.flatten(), rows.positions.flatten(), attend)
        logits = self._target.logits(output.hidden).view(*shape, -1)
        # The feature size may be 0, which a view cannot infer.
        return NodeOutput(logits, output.features.view(*shape, output.features.shape[1]), scratch)

    def commit(self, batch: DecodeBatch, rows: StepRows, output: NodeOutput) -> Tensor:
        """Verify, move the accepted path from scratch to pages, and advance the rows.

        Returns the answer [B, 2 D + 5] int64 of `CommittedRows`.
        """
        sampling = self._state.sampling(batch.slots, rows, batch.flags)
        verification = self._verify(output.logits, rows.draft, batch.tree, sampling, rows.root_positions)
        committed = self._state.commit(
            batch.slots, rows, verification, output.features, self._block_size, sampling.is_penalized
        )
        self._pool.commit(committed.pool_slots, output.scratch, committed.scratch_rows)
        return committed.answer
