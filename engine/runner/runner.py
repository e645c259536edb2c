"""Executing step plans on one device: prefill chunks, then draft, target forward, verify and commit.

What a step holds is decided by the scheduler; how a network computes is left to the modules it is given.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend, AttentionLayout
from engine.batch import PrefillChunk, StepPlan
from engine.config import DraftMode
from engine.draft.drafter import DraftNoise, TreeDrafter
from engine.errors import AdmissionError
from engine.kvcache.kv_pool import KVPool, slots_of
from engine.kvcache.tree_scratch import TreeScratch
from engine.model.llama import LlamaForCausalLM, TargetOutput
from engine.request import SamplingParams
from engine.runner.slot_state import SlotState
from engine.runner.step_handle import StepHandle, StepTimer
from engine.sampling.verify import verify
from engine.speculation import DraftOutput, SamplingTensors, TreeTensors, Verification
from engine.tree.topology import TreeTopology


@dataclass(frozen=True, slots=True)
class RunnerShape:
    """The sizes that the device memory of a runner follows from."""

    max_num_seqs: int
    num_blocks: int
    block_size: int
    table_width: int
    feature_window: int
    draft_mode: DraftMode


class ModelRunner:
    """Owns the networks and every tensor of the engine; `launch` reads nothing back from the device."""

    def __init__(
        self,
        target: LlamaForCausalLM,
        drafter: TreeDrafter | None,
        backend: AttentionBackend,
        shape: RunnerShape,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        config = target.config
        weight = target.embed_tokens.weight
        self.device, dtype = weight.device, weight.dtype
        self._target, self._backend, self._shape = target, backend, shape
        self._eos_token_ids = eos_token_ids
        kv_shape = (config.num_kv_heads, config.head_dim, dtype, self.device)
        self._pool = KVPool(config.num_layers, shape.num_blocks, shape.block_size, *kv_shape)
        self._scratch = TreeScratch(config.num_layers, dtype)
        self._state = SlotState(
            num_slots=shape.max_num_seqs + 1,
            table_width=shape.table_width,
            window=shape.feature_window,
            feature_size=len(target.taps) * config.hidden_size,
            vocab_size=config.vocab_size,
            dtype=dtype,
            device=self.device,
        )
        self._drafter = drafter
        self._params: list[SamplingParams] = [SamplingParams(temperature=0.0)] * (shape.max_num_seqs + 1)
        # Per slot an upper bound of the positions whose draft K/V is missing, root included.
        self._num_pending = [1] * (shape.max_num_seqs + 1)
        self._trees: dict[tuple[TreeTopology, ...], TreeTensors] = {}

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Enqueue one step. The answer holds a row per decode row of the plan.

        Raises `AdmissionError`, before anything of the step runs, for a sequence that cannot take its slot;
        the plan without it may be launched again.
        """
        timer = StepTimer(self.device)
        for admission in plan.admissions:
            try:
                self._state.admit(admission, self._eos_token_ids)
            except Exception as error:  # whatever it was, it is the fault of one request
                raise AdmissionError(admission.slot) from error
            self._params[admission.slot] = admission.sampling
            self._num_pending[admission.slot] = 1
        for growth in plan.growths:
            self._state.grow(growth)
        nothing = torch.empty(0, dtype=torch.bool)
        is_chunk_finite = self._prefill(plan.chunks) if plan.chunks else nothing
        if not plan.rows:
            return StepHandle(plan.step_idx, nothing[:, None], nothing, is_chunk_finite, timer)
        answer = self._decode(plan)
        return StepHandle(plan.step_idx, answer.token_ids, answer.is_finite, is_chunk_finite, timer)

    def _prefill(self, chunks: tuple[PrefillChunk, ...]) -> Tensor:
        """Cache the K/V of every chunk in one pass over their tokens side by side; return which of them are
        finite, [C] bool.
        """
        token_ids = self._tensor([token for chunk in chunks for token in chunk.token_ids])
        positions = self._tensor([chunk.start + i for chunk in chunks for i in range(len(chunk.token_ids))])
        store_from = self._tensor([chunk.store_from for chunk in chunks for _ in chunk.token_ids])
        owners = self._tensor([chunk.slot for chunk in chunks for _ in chunk.token_ids])
        tables = self._state.block_tables[owners]
        slots = slots_of(
            tables, positions[:, None], (positions >= store_from)[:, None], self._shape.block_size
        )
        bound = [self._backend.bind(self._chunk_layout(chunk), self._shape.block_size) for chunk in chunks]
        ends = list(itertools.accumulate(len(chunk.token_ids) for chunk in chunks))
        spans = [slice(end - len(chunk.token_ids), end) for chunk, end in zip(chunks, ends, strict=True)]

        def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._pool.store(layer_idx, slots.flatten(), k, v)
            k_pages, v_pages = self._pool.k[layer_idx], self._pool.v[layer_idx]
            parts = zip(bound, spans, strict=True)
            return torch.cat([fn(q[None, s], k[None, s], v[None, s], k_pages, v_pages)[0] for fn, s in parts])

        output = self._target(token_ids, positions, attend)
        for chunk, span in zip(chunks, spans, strict=True):
            self._note_chunk(chunk, token_ids[span], output.features[span])
        return torch.stack([output.hidden[span].isfinite().all() for span in spans])

    def _note_chunk(self, chunk: PrefillChunk, token_ids: Tensor, features: Tensor) -> None:
        """Keep a chunk's features, and let the draft cache the pairs they make with the tokens after them."""
        if self._drafter is not None:
            following = torch.cat((token_ids, self._tensor([chunk.next_token_id])))
            self._drafter.fill(self._state.prompt_window(chunk, following, features, self._shape.block_size))
        self._state.note_prefill(chunk, token_ids, features)

    def _chunk_layout(self, chunk: PrefillChunk) -> AttentionLayout:
        """Every token of a chunk reads the cached prompt before it and the chunk up to itself."""
        size = len(chunk.token_ids)
        table = self._state.block_tables[chunk.slot : chunk.slot + 1, : self._num_blocks(chunk.start)]
        window = torch.zeros(1, size, dtype=torch.int64, device=self.device)
        causal = torch.ones(1, size, size, dtype=torch.bool, device=self.device).tril()
        return AttentionLayout(table, window, window + chunk.start, causal)

    def _decode(self, plan: StepPlan) -> Verification:
        """Draft, verify and commit one tree per row."""
        host_slots = [row.slot for row in plan.rows]
        slots = self._tensor(host_slots)
        tree = self._tree_tensors(tuple(row.topology for row in plan.rows))
        num_blocks = self._num_blocks(plan.max_prefix_len + tree.depth + 1)
        tables = self._state.block_tables[slots, :num_blocks]
        sampling = self._state.sampling(slots, [self._params[slot] for slot in host_slots])
        root_positions = self._state.seq_len[slots]
        draft = self._draft(host_slots, slots, tree, tables, sampling)
        prefix_tables = tables[:, : self._num_blocks(plan.max_prefix_len)]
        output = self._run_target(draft, tree, root_positions, prefix_tables)
        logits = self._target.logits(output.hidden).view(len(host_slots), tree.num_nodes, -1)
        verification = verify(logits, draft, tree, sampling, root_positions)
        self._commit(verification, output, slots, tables, sampling.is_penalized)
        return verification

    def _draft(
        self,
        host_slots: list[int],
        slots: Tensor,
        tree: TreeTensors,
        tables: Tensor,
        sampling: SamplingTensors,
    ) -> DraftOutput:
        """Draft the trees; a step of roots only does no draft work, and its positions stay pending."""
        if tree.depth == 0 or self._drafter is None:
            for slot in host_slots:
                self._num_pending[slot] += 1
            return DraftOutput(self._state.root_token[slots][:, None])
        width = min(max(self._num_pending[slot] for slot in host_slots), self._shape.feature_window)
        for slot in host_slots:
            self._num_pending[slot] = tree.depth + 1
        window = self._state.align_window(slots, width, tables)
        noise = DraftNoise(sampling.seed, sampling.temperature)
        return self._drafter.draft(
            window, tree, self._shape.draft_mode, noise, self._target.config.vocab_size
        )

    def _run_target(
        self, draft: DraftOutput, tree: TreeTensors, root_positions: Tensor, tables: Tensor
    ) -> TargetOutput:
        """Run every node of every tree at once: prefix attention over pages, suffix attention over the
        scratch.
        """
        shape = (tree.num_rows, tree.num_nodes)
        ends = root_positions[:, None].expand(shape)
        layout = AttentionLayout(tables, torch.zeros_like(ends), ends, tree.ancestor_mask())
        attend_pages = self._backend.bind(layout, self._shape.block_size)

        def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.view(*shape, *x.shape[1:]) for x in (q, k, v))
            stored_k, stored_v = self._scratch.store(layer_idx, k, v)
            pages = self._pool.k[layer_idx], self._pool.v[layer_idx]
            return attend_pages(q, stored_k, stored_v, *pages).flatten(0, 1)

        positions = (root_positions[:, None] + tree.depths).flatten()
        output: TargetOutput = self._target(draft.token_ids.clamp(min=0).flatten(), positions, attend)
        return output

    def _commit(
        self,
        verification: Verification,
        output: TargetOutput,
        slots: Tensor,
        tables: Tensor,
        is_penalized: bool,
    ) -> None:
        """Move the accepted path from scratch to pages and advance the rows."""
        path = verification.path
        step = torch.arange(path.shape[1], device=self.device)
        is_kept = step <= verification.num_accepted[:, None]
        positions = self._state.seq_len[slots][:, None] + step
        pool_slots = slots_of(tables, positions, is_kept, self._shape.block_size)
        self._pool.commit(pool_slots.flatten(), *self._scratch.gather(path))
        num_rows = path.shape[0]
        features = output.features.view(
            num_rows, output.features.shape[0] // num_rows, output.features.shape[1]
        )
        rows = torch.arange(num_rows, device=self.device)[:, None]
        self._state.commit(slots, verification, features[rows, path], is_penalized)

    def _tree_tensors(self, topologies: tuple[TreeTopology, ...]) -> TreeTensors:
        """Return the node table of a step; the same topologies come back step after step."""
        if topologies not in self._trees:
            if len(self._trees) >= 256:
                self._trees.clear()
            num_nodes = max(topology.num_nodes for topology in topologies)
            self._trees[topologies] = TreeTensors.build(topologies, num_nodes, self.device)
        return self._trees[topologies]

    def _num_blocks(self, num_positions: int) -> int:
        return min(-(-num_positions // self._shape.block_size), self._shape.table_width)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
