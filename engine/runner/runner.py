"""Executing step plans on one device: prefill chunks, then draft, target forward, verify and commit.

What a step holds is decided by the scheduler; how a network computes is left to the modules it is given.
"""

import functools
import logging
import operator
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend
from engine.batch import Admission, StepPlan
from engine.config import DraftMode
from engine.draft.drafter import TreeDrafter
from engine.errors import AdmissionError
from engine.kvcache.kv_pool import KVPool
from engine.model.llama import LlamaForCausalLM
from engine.runner.decode_step import DecodeBatch, DecodeStep
from engine.runner.draft_site import DraftSite
from engine.runner.graphs import StepGraphs, row_bucket
from engine.runner.pending import PendingDraft
from engine.runner.prefill_step import PrefillStep
from engine.runner.slot_ops import SlotOps
from engine.runner.slot_state import SlotState
from engine.runner.step_handle import StepHandle, StepTimer
from engine.sampling.verify import Verify, verify
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
        verify: Verify = verify,
        slot_ops: SlotOps | None = None,
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
            ops=slot_ops,
        )
        self._flags = [SamplingFlags()] * (shape.max_num_seqs + 1)
        self._pending = PendingDraft(shape.max_num_seqs + 1, shape.feature_window)
        self._trees: dict[tuple[TreeTopology, ...], TreeTensors] = {}
        self._prefill_step = PrefillStep(target, drafter, backend, self._pool, self._state)
        self._step = DecodeStep(target, drafter, backend, self._pool, self._state, verify, shape.draft_mode)
        self._timer: StepTimer | None = None  # of the last launch
        self._graphs: StepGraphs | None = None
        # Sampled drafts hand over probabilities of the whole vocabulary, which are not worth a copy each.
        if self.device.type == "cuda" and backend.is_capturable and shape.draft_mode == "greedy":
            self._graphs = StepGraphs(
                self._step, shape.max_num_seqs, shape.table_width, shape.feature_window, self.device
            )
        self.draft_site = DraftSite(target, drafter, self._state, self._pending, self._graphs)

    @property
    def is_captured(self) -> bool:
        """True where steps are replayed, their rows padded to a `row_bucket`."""
        return self._graphs is not None

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

    @property
    def page_pools(self) -> tuple[KVPool, ...]:
        """The pages of the target and of the draft."""
        return (self._pool, *self.draft_site.pools)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Enqueue one step. The answer holds a row per decode row of the plan.

        Raises `AdmissionError`, before anything of the step runs, for a sequence that cannot take its slot;
        the plan without it may be launched again.
        """
        timer = StepTimer(self.device, self._timer)
        if plan.admissions:
            self._admit(plan.admissions)
        if plan.growths:
            self._state.grow(plan.growths)
        nothing = torch.empty(0, dtype=torch.int64)
        is_chunk_finite = self._prefill_step.run(plan.chunks) if plan.chunks else nothing.bool()
        answer = self._decode(plan) if plan.rows else nothing[:, None]
        self._timer = timer
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
            self._pending.admit(admission.slot)

    def _decode(self, plan: StepPlan) -> Tensor:
        """Draft, verify and commit one tree per row; return what `DecodeStep.commit` does."""
        slots = [row.slot for row in plan.rows]
        topologies = tuple(row.topology for row in plan.rows)
        depth = max(topology.depth for topology in topologies)
        flags = functools.reduce(operator.or_, {self._flags[slot] for slot in slots})
        num_pending = self._pending.plan(slots, depth)
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
        rows = self._step.room(batch)
        self._step.draft(batch, rows)
        return self._step.commit(batch, rows, self._step.run_target(batch, rows))

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
