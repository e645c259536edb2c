"""Device state of the running sequences, one row per slot, written by patches before a step and by commits
after it.

It is why the host can be a step late: lengths, last tokens and features never leave the device. Slot 0 is the
dummy.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch import Admission, BlockGrowth
from engine.request import MAX_LOGIT_BIASES, MAX_STOP_TOKENS
from engine.runner.slot_ops import SlotOps, TorchSlotOps
from engine.speculation import SamplingFlags, SamplingTensors, TreeTensors, Verification, upload
from engine.step_rows import AlignWindow, CommittedRows, SlotTables, StepRows


class SlotState:
    """S = max_num_seqs + 1 rows of state: `tables`, and what only some requests ask for."""

    def __init__(
        self,
        *,
        num_slots: int,
        table_width: int,
        window: int,
        feature_size: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        ops: SlotOps | None = None,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=device)

        self.device = device
        self.tables = SlotTables.zeros(num_slots, table_width, window, feature_size, dtype, device)
        self._ops = ops or TorchSlotOps()
        self._bias_token_ids = zeros(MAX_LOGIT_BIASES)
        self._bias_values = zeros(MAX_LOGIT_BIASES, dtype=torch.float32)
        self._stop_token_ids = zeros(MAX_STOP_TOKENS)
        self._prompt_mask = zeros(vocab_size, dtype=torch.bool)
        self._output_counts = zeros(vocab_size, dtype=torch.int32)

    def admit(self, admissions: Sequence[Admission], eos_token_ids: tuple[int, ...]) -> None:
        """Set every row of the slots that sequences take."""
        params = [a.sampling for a in admissions]
        numbers = (
            [p.temperature for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
            [p.repetition_penalty for p in params],
            [p.presence_penalty for p in params],
            [p.frequency_penalty for p in params],
        )
        vocab_size = self._output_counts.shape[1]
        columns = (
            [a.slot for a in admissions],
            [len(a.tokens) - 1 for a in admissions],
            [a.tokens[-1] for a in admissions],
            [a.draft_start for a in admissions],
            [a.seed for a in admissions],
            [a.sampling.top_k or vocab_size for a in admissions],
            # 0 when there is no minimum: no position is before it, and the ids are not read.
            [a.num_prompt + a.sampling.min_tokens if a.sampling.min_tokens else 0 for a in admissions],
        )
        table = self._rows(columns, torch.int64)
        slots, root_position, root_token, draft_start = table[:4]
        self.tables.seq_len[slots] = root_position
        self.tables.draft_len[slots] = root_position
        self.tables.root_token[slots] = root_token
        self.tables.draft_start[slots] = draft_start
        self.tables.integers[:, slots] = table[4:]
        self.tables.numbers[:, slots] = self._rows(numbers, torch.float32)
        self.tables.block_tables.index_fill_(0, slots, 0)
        self.tables.features.index_fill_(0, slots, 0)
        # Read as soon as one row of the batch is biased, so an unbiased row must not keep what its slot had.
        self._bias_values.index_fill_(0, slots, 0.0)
        for admission in admissions:
            self._admit_vocabulary(admission, eos_token_ids)

    def _admit_vocabulary(self, admission: Admission, eos_token_ids: tuple[int, ...]) -> None:
        slot, params = admission.slot, admission.sampling
        if params.logit_bias:
            token_ids, values = zip(*params.logit_bias, strict=True)
            self._bias_token_ids[slot, : len(values)] = self._row(token_ids, torch.int64)
            self._bias_values[slot, : len(values)] = self._row(values, torch.float32)
        if params.is_penalized:
            tokens = self._row(admission.tokens, torch.int64)
            self._prompt_mask[slot].zero_()
            self._prompt_mask[slot].index_fill_(0, tokens[: admission.num_prompt], True)
            counts = self._output_counts[slot].zero_()
            emitted = tokens[admission.num_prompt :]
            counts.scatter_add_(0, emitted, torch.ones_like(emitted, dtype=torch.int32))
        if params.min_tokens:
            eos_ids = () if params.ignore_eos else eos_token_ids
            stops = list(dict.fromkeys((*params.stop_token_ids, *eos_ids)))
            self._stop_token_ids[slot].fill_(-1)
            self._stop_token_ids[slot, : len(stops)] = self._row(stops, torch.int64)

    def grow(self, growths: Sequence[BlockGrowth]) -> None:
        """Append blocks to the tables of slots."""
        slots = [growth.slot for growth in growths for _ in growth.block_ids]
        columns = [growth.start_idx + i for growth in growths for i in range(len(growth.block_ids))]
        block_ids = [block_id for growth in growths for block_id in growth.block_ids]
        entries = self._row(slots + columns + block_ids, torch.int64).view(3, -1)
        self.tables.block_tables[entries[0], entries[1]] = entries[2]

    def note_prefill(
        self, slots: Tensor, starts: Tensor, cu_seqlens: Tensor, token_ids: Tensor, features: Tensor
    ) -> None:
        """Keep the last W tokens and features of C chunks, slots and starts [C], side by side in token_ids
        [T] and features [T, F] with bounds cu_seqlens [C + 1]. Before position 0 there is padding.
        """
        window = self.tables.window
        offsets = cu_seqlens.diff()[:, None] - 1 - torch.arange(window, device=self.device)
        positions, rows = starts[:, None] + offsets, (cu_seqlens[:-1, None] + offsets).clamp(min=0)
        places = (slots[:, None], torch.where((offsets >= 0) & (positions >= 0), positions % window, window))
        self.tables.features[places] = features[rows]
        self.tables.tokens[places] = token_ids[rows]

    def open(self, slots: Tensor, tree: TreeTensors, rows: StepRows) -> None:
        """Fill `rows` from the rows `slots` [B] of state."""
        self._ops.open(self.tables, slots, tree, rows)

    def align(self, slots: Tensor, tree: TreeTensors, rows: StepRows, width: int) -> AlignWindow:
        """Open `rows` and return the last `width` positions of each, which count as cached in the draft from
        now on.
        """
        return self._ops.align(self.tables, slots, tree, rows, width)

    def commit(
        self,
        slots: Tensor,
        rows: StepRows,
        verification: Verification,
        features: Tensor,
        block_size: int,
        is_penalized: bool,
    ) -> CommittedRows:
        """Advance rows `slots` [B] by what was emitted; features: [B, N, F], of every node."""
        if is_penalized:
            step = torch.arange(verification.path.shape[1], device=self.device)
            counts = (step <= verification.num_accepted[:, None]).to(torch.int32)
            token_ids = verification.token_ids.clamp(min=0)
            places = (slots[:, None].expand_as(token_ids), token_ids)
            self._output_counts.index_put_(places, counts, accumulate=True)
        return self._ops.commit(self.tables, slots, rows, verification, features, block_size)

    def sampling(self, slots: Tensor, rows: StepRows, flags: SamplingFlags) -> SamplingTensors:
        """Return how the rows `slots` [B] of `rows` draw."""
        nothing = slots[:, None][:, :0]
        seed, top_k, stop_from = rows.integers
        temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty = rows.numbers
        return SamplingTensors(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=seed,
            bias_token_ids=self._bias_token_ids[slots] if flags.is_biased else nothing,
            bias_values=self._bias_values[slots] if flags.is_biased else nothing.float(),
            prompt_mask=self._prompt_mask[slots] if flags.is_penalized else nothing.bool(),
            output_counts=self._output_counts[slots] if flags.is_penalized else nothing.int(),
            stop_token_ids=self._stop_token_ids[slots] if flags.has_min_tokens else nothing,
            stop_from=stop_from,
            **flags._asdict(),
        )

    def _rows(self, columns: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
        return self._row([value for column in columns for value in column], dtype).view(len(columns), -1)

    def _row(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return upload(values, dtype, self.device)
