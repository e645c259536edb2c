"""Executing step plans on one device: prefill chunks, then draft, target forward, verify and commit.

What a step holds is decided by the scheduler; how a network computes is left to the modules it is given.
"""

import functools
import itertools
import logging
import operator
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend, AttentionLayout
from engine.batch import Admission, PrefillChunk, StepPlan
from engine.config import DraftMode
from engine.draft.drafter import TreeDrafter
from engine.errors import AdmissionError
from engine.kvcache.kv_pool import KVPool, slots_of
from engine.layers.rotary import Angles, rotate_qkv
from engine.model.llama import LlamaForCausalLM
from engine.runner.decode_step import DecodeBatch, DecodeStep
from engine.runner.graphs import StepGraphs, row_bucket
from engine.runner.slot_state import SlotState
from engine.runner.step_handle import StepHandle, StepTimer
from engine.sampling.verify import verify
from engine.speculation import SamplingFlags, TreeShape, TreeTensors, upload
from engine.tree.topology import TreeTopology

logger = logging.getLogger(__name__)


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
        self._flags = [SamplingFlags()] * (shape.max_num_seqs + 1)
        # Per slot an upper bound of the positions whose draft K/V is missing, root included.
        self._num_pending = [1] * (shape.max_num_seqs + 1)
        self._trees: dict[tuple[TreeTopology, ...], TreeTensors] = {}
        self._step = DecodeStep(target, drafter, backend, self._pool, self._state, verify, shape.draft_mode)
        self._graphs: StepGraphs | None = None
        # Sampled drafts hand over probabilities of the whole vocabulary, which are not worth a copy each.
        if self.device.type == "cuda" and backend.is_capturable and shape.draft_mode == "greedy":
            self._graphs = StepGraphs(
                self._step, shape.max_num_seqs, shape.table_width, shape.feature_window, self.device
            )

    def capture(self, topology: TreeTopology, num_rows: range) -> None:
        """Prepare steps of so many rows whose widest tree is `topology`, where this device and this attention
        backend can replay them.
        """
        if self._graphs is None:
            return
        before, started = self._graphs.num_graphs, time.perf_counter()
        # The largest first: the smaller ones find room in its memory.
        for bucket in sorted({row_bucket(rows) for rows in num_rows}, reverse=True):
            self._graphs.capture(topology, bucket)
        logger.info(
            "captured tree=%s rows=%d..%d graphs=%d seconds=%.1f",
            topology.name,
            num_rows[0],
            num_rows[-1],
            self._graphs.num_graphs - before,
            time.perf_counter() - started,
        )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Enqueue one step. The answer holds a row per decode row of the plan.

        Raises `AdmissionError`, before anything of the step runs, for a sequence that cannot take its slot;
        the plan without it may be launched again.
        """
        timer = StepTimer(self.device)
        if plan.admissions:
            self._admit(plan.admissions)
        if plan.growths:
            self._state.grow(plan.growths)
        nothing = torch.empty(0, dtype=torch.int64)
        is_chunk_finite = self._prefill(plan.chunks) if plan.chunks else nothing.bool()
        answer = self._decode(plan) if plan.rows else nothing[:, None]
        return StepHandle(plan.step_idx, answer, is_chunk_finite, timer)

    def _admit(self, admissions: tuple[Admission, ...]) -> None:
        try:
            self._state.admit(admissions, self._eos_token_ids)
        except Exception:  # whatever it was, it is the fault of one request: find it
            for admission in admissions:
                try:
                    self._state.admit((admission,), self._eos_token_ids)
                except Exception as error:
                    raise AdmissionError(admission.slot) from error
        for admission in admissions:
            self._flags[admission.slot] = SamplingFlags.of(admission.sampling)
            self._num_pending[admission.slot] = 1

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

        def attend(layer_idx: int, qkv: Tensor, angles: Angles) -> Tensor:
            q, k, v = rotate_qkv(qkv, angles, self._pool.num_kv_heads)
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

    def _decode(self, plan: StepPlan) -> Tensor:
        """Draft, verify and commit one tree per row; return what `DecodeStep.commit` does."""
        slots = [row.slot for row in plan.rows]
        topologies = tuple(row.topology for row in plan.rows)
        depth = max(topology.depth for topology in topologies)
        flags = functools.reduce(operator.or_, {self._flags[slot] for slot in slots})
        num_pending = max(self._num_pending[slot] for slot in slots)
        for slot in slots:
            # A step of roots only does no draft work: its positions stay pending.
            self._num_pending[slot] = depth + 1 if depth else self._num_pending[slot] + 1
        if self._graphs is not None:
            answer = self._graphs.replay(slots, topologies, num_pending, flags)
            if answer is not None:
                return answer
        batch = DecodeBatch(
            slots=self._tensor(slots),
            tree=self._tree_tensors(topologies),
            flags=flags,
            align_width=min(num_pending, self._shape.feature_window),
            num_read_blocks=self._num_blocks(plan.max_prefix_len),
            num_blocks=self._num_blocks(plan.max_prefix_len + depth + 1),
        )
        draft = self._step.draft(batch)
        return self._step.commit(batch, draft, self._step.run_target(batch, draft))

    def _tree_tensors(self, topologies: tuple[TreeTopology, ...]) -> TreeTensors:
        """Return the node table of a step; the same topologies come back step after step."""
        if topologies not in self._trees:
            if len(self._trees) >= 256:
                self._trees.clear()
            self._trees[topologies] = TreeTensors.padded(topologies, TreeShape.of(topologies), self.device)
        return self._trees[topologies]

    def _num_blocks(self, num_positions: int) -> int:
        return min(-(-num_positions // self._shape.block_size), self._shape.table_width)

    def _tensor(self, values: list[int]) -> Tensor:
        return upload(values, torch.int64, self.device)
