"""Executing step plans on one device: prefill chunks, then draft, target forward, verify and commit.

What a step holds is decided by the scheduler; how a network computes is left to the modules it is given.
"""

import functools
from dataclasses import dataclass

import torch

from engine.attention.backend import AttentionBackend
from engine.batch import Admission, StepPlan
from engine.config import DraftMode
from engine.draft.drafter import TreeDrafter
from engine.errors import AdmissionError
from engine.grammar.backend import OpenBackend, no_backend
from engine.kvcache.kv_pool import KVPool
from engine.model.llama import LlamaForCausalLM
from engine.runner.decode_step import DecodeBatch, DecodeStep
from engine.runner.draft_site import DraftSite
from engine.runner.graph_recorder import GraphRecorder
from engine.runner.graphs import StepGraphs
from engine.runner.guides import GuidedStep, Guides
from engine.runner.launch_rows import LaunchRows
from engine.runner.logprobs import LogprobReader
from engine.runner.pending import PendingDraft
from engine.runner.prefill_graphs import PrefillGraphs
from engine.runner.prefill_step import PrefillStep
from engine.runner.slot_ops import SlotOps
from engine.runner.slot_state import SlotState
from engine.runner.step_handle import StepHandle, StepTimer
from engine.runner.step_output import DecodedRows
from engine.sampling.verify import Verify, verify
from engine.speculation import SamplingFlags, TreeTensors, upload
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
    kv_dtype: torch.dtype


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
        open_grammars: OpenBackend = no_backend,
    ) -> None:
        config = target.config
        weight = target.embed_tokens.weight
        self.device, dtype = weight.device, weight.dtype
        self._target, self._backend, self._shape = target, backend, shape
        self._eos_token_ids = eos_token_ids
        kv_shape = (config.num_kv_heads, config.head_dim, shape.kv_dtype, self.device)
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
        self.guides = Guides(open_grammars, config.vocab_size, self.device)
        self._flags = [SamplingFlags()] * (shape.max_num_seqs + 1)
        self._pending = PendingDraft(shape.max_num_seqs + 1, shape.feature_window)
        self._logprobs = LogprobReader(target.logits)
        self._rows: LaunchRows | None = None  # of the last launch
        # The same topologies come back step after step.
        padded = functools.partial(TreeTensors.padded, device=self.device)
        self._tree_tensors = functools.lru_cache(256)(padded)
        recorder = GraphRecorder(self.device) if self.device.type == "cuda" else None
        prefill_step = PrefillStep(target, drafter, backend, self._pool, self._state)
        self.prefill = PrefillGraphs(prefill_step, recorder, shape.max_num_seqs)
        self._step = DecodeStep(target, drafter, backend, self._pool, self._state, verify, shape.draft_mode)
        self._timer: StepTimer | None = None  # of the last launch
        self._graphs: StepGraphs | None = None
        # Sampled drafts hand over probabilities of the whole vocabulary, which are not worth a copy each.
        if recorder is not None and backend.is_capturable and shape.draft_mode == "greedy":
            sizes = (shape.max_num_seqs, shape.table_width, shape.feature_window)
            self._graphs = StepGraphs(self._step, recorder, *sizes)
        self.draft_site = DraftSite(target, drafter, self._state, self._pending, self.prefill, self._graphs)

    @property
    def is_captured(self) -> bool:
        """True where steps are replayed, their rows padded to a `row_bucket`."""
        return self._graphs is not None

    def capture(self, topology: TreeTopology, num_rows: range) -> None:
        """Prepare steps of so many rows whose widest tree is `topology`, where this device and this attention
        backend can replay them.
        """
        if self._graphs is not None:
            self._graphs.capture_rows(topology, num_rows)

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
        prefilled = self.prefill.run(plan.chunks) if plan.chunks else None
        guide = self.guides.open(plan.rows)
        decoded = self._decode(plan, guide) if plan.rows else None
        if guide is not None and decoded is not None:
            guide.unmask_target(decoded.logits)
        logprobs = self._logprobs.read(plan.rows, decoded, plan.chunks, prefilled)
        self._timer = timer
        return StepHandle(plan, decoded, prefilled, logprobs, timer, guide)

    def _admit(self, admissions: tuple[Admission, ...]) -> None:
        try:
            self._state.admit(admissions, self._eos_token_ids)
            self.guides.admit(admissions)
        except Exception:  # whatever it was, it is the fault of one request: find it
            for admission in admissions:
                try:
                    self._state.admit((admission,), self._eos_token_ids)
                    self.guides.admit((admission,))
                except Exception as error:
                    raise AdmissionError(admission.slot) from error
        self._rows = None  # it may hold flags of the last owner of a slot
        for admission in admissions:
            self._flags[admission.slot] = SamplingFlags.of(admission.sampling)
            self._pending.admit(admission.slot)
            self._logprobs.admit(admission)

    def _decode(self, plan: StepPlan, guide: GuidedStep | None) -> DecodedRows:
        """Draft, verify and commit one tree per row; return what `DecodeStep.commit` does, and padding."""
        if self._rows is None or self._rows.rows != plan.rows:
            self._rows = LaunchRows.of(plan.rows, self._flags)
        asked = self._rows
        num_pending = self._pending.plan(asked.slots, asked.shape.depth)
        if self._graphs is not None:
            decoded = self._graphs.replay(asked, num_pending, guide)
            if decoded is not None:
                return decoded
        batch = DecodeBatch(
            slots=upload(asked.slots, torch.int64, self.device),
            tree=self._tree_tensors(asked.topologies, asked.shape),
            flags=asked.flags,
            align_width=min(num_pending, self._shape.feature_window),
            num_read_blocks=self._num_blocks(plan.max_prefix_len),
            num_blocks=self._num_blocks(plan.max_prefix_len + asked.shape.depth + 1),
        )
        rows = self._step.room(batch, guide)
        self._step.draft(batch, rows)
        if guide is not None:
            guide.read(rows.draft.token_ids)
        output = self._step.run_target(batch, rows)
        if guide is not None:
            guide.mask_target(output.logits)
        return self._step.commit(batch, rows, output)

    def _num_blocks(self, num_positions: int) -> int:
        return min(-(-num_positions // self._shape.block_size), self._shape.table_width)
