"""Device state of the running sequences, one row per slot, written by patches before a step and by commits
after it.

It is why the host can be a step late: lengths, last tokens and features never leave the device. Slot 0 is the
dummy.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.batch import DUMMY_SLOT, Admission, BlockGrowth, PrefillChunk
from engine.draft.ops import AlignWindow
from engine.kvcache.kv_pool import slots_of
from engine.request import MAX_LOGIT_BIASES, MAX_STOP_TOKENS
from engine.runner.step_rows import NUM_INTEGERS, NUM_NUMBERS, CommittedRows, StepRows
from engine.speculation import SamplingFlags, SamplingTensors, TreeTensors, Verification, upload


class SlotOps(Protocol):
    """What a step reads and writes of the slots, for one device; `SlotState` says what each is for."""

    def open(self, state: "SlotState", slots: Tensor, tree: TreeTensors, rows: StepRows) -> None:
        """See `SlotState.open`."""

    def align(
        self, state: "SlotState", slots: Tensor, tree: TreeTensors, rows: StepRows, width: int
    ) -> AlignWindow:
        """See `SlotState.align`."""

    def commit(
        self,
        state: "SlotState",
        slots: Tensor,
        rows: StepRows,
        verification: Verification,
        features: Tensor,
        block_size: int,
    ) -> CommittedRows:
        """See `SlotState.commit`; penalties are the state's own."""


class TorchSlotOps:
    """Plain torch on any device."""

    def open(self, state: "SlotState", slots: Tensor, tree: TreeTensors, rows: StepRows) -> None:
        """See `SlotState.open`."""
        torch.index_select(state.seq_len, 0, slots, out=rows.root_positions)
        torch.add(rows.root_positions[:, None], tree.depths, out=rows.positions)
        tables = state.block_tables[:, : rows.block_tables.shape[1]]
        torch.index_select(tables, 0, slots, out=rows.block_tables)
        torch.index_select(state.integers, 1, slots, out=rows.integers)
        torch.index_select(state.numbers, 1, slots, out=rows.numbers)
        rows.draft.token_ids.fill_(-1)[:, 0] = state.root_token[slots]
        if rows.draft.children is not None:
            rows.draft.children.fill_(-1)

    def align(
        self, state: "SlotState", slots: Tensor, tree: TreeTensors, rows: StepRows, width: int
    ) -> AlignWindow:
        """See `SlotState.align`."""
        self.open(state, slots, tree, rows)
        root, row = rows.root_positions, slots[:, None]
        draft_len, draft_start = state.draft_len[slots], state.draft_start[slots]
        first = torch.maximum(draft_len, root + 1 - width).minimum(root)
        # Positions between draft_len and first have no draft K/V and never will: the window starts after that
        # hole.
        start = torch.where(first > draft_len, first, draft_start)
        positions = root[:, None] + torch.arange(1 - width, 1, device=state.device)
        state.draft_len[slots] = root + 1
        state.draft_start[slots] = start
        return AlignWindow(
            positions=positions,
            is_pending=positions >= first[:, None],
            token_ids=torch.cat(
                (state.tokens[row, positions[:, :-1] % state.window], state.root_token[row]), dim=1
            ),
            features=state.features[row, (positions - 1) % state.window],
            prefix_start=start,
            prefix_end=first,
            block_tables=rows.block_tables,
        )

    def commit(
        self,
        state: "SlotState",
        slots: Tensor,
        rows: StepRows,
        verification: Verification,
        features: Tensor,
        block_size: int,
    ) -> CommittedRows:
        """See `SlotState.commit`."""
        path, token_ids = verification.path, verification.token_ids
        step = torch.arange(path.shape[1], device=state.device)
        is_kept = step <= verification.num_accepted[:, None]
        positions = rows.root_positions[:, None] + step
        row, slot = torch.arange(len(slots), device=state.device)[:, None], slots[:, None]
        columns = torch.where(is_kept, positions % state.window, state.window)
        state.features[slot, columns] = features[row, path]
        state.tokens[slot, columns] = torch.cat(
            (state.root_token[slot], token_ids[:, :-1].clamp(min=0)), dim=1
        )
        state.seq_len[slots] = rows.root_positions + (verification.num_accepted + 1)
        state.root_token[slots] = verification.next_token
        state.seq_len[DUMMY_SLOT].zero_()  # an assignment would copy the number from the host
        return CommittedRows(
            answer=torch.cat((token_ids, verification.is_finite[:, None].long()), dim=1),
            pool_slots=slots_of(rows.block_tables, positions, is_kept, block_size).flatten(),
            scratch_rows=(row * features.shape[1] + path).flatten(),
        )


class SlotState:
    """S = max_num_seqs + 1 rows of state.

    seq_len: [S] int64 counts cached target tokens, so it is the position of the root; root_token: [S] int64.
    Draft K/V is valid for positions [draft_start, draft_len). features: [S, W + 1, F] and tokens: [S, W + 1]
    are rings over the last W positions, indexed by position modulo W; column W takes the writes of padding.
    """

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

        self.window = window
        self.device = device
        self.seq_len, self.root_token, self.draft_len, self.draft_start = zeros(), zeros(), zeros(), zeros()
        self.block_tables = zeros(table_width)
        self.features = zeros(window + 1, feature_size, dtype=dtype)
        self.tokens = zeros(window + 1)
        self._ops = ops or TorchSlotOps()
        # seed, top_k, stop_from; temperature, top_p, min_p, repetition, presence and frequency penalty: rows
        # of one table, so that one gather reads all.
        self.integers = torch.zeros(NUM_INTEGERS, num_slots, dtype=torch.int64, device=device)
        self.numbers = torch.zeros(NUM_NUMBERS, num_slots, device=device)
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
        self.seq_len[slots] = root_position
        self.draft_len[slots] = root_position
        self.root_token[slots] = root_token
        self.draft_start[slots] = draft_start
        self.integers[:, slots] = table[4:]
        self.numbers[:, slots] = self._rows(numbers, torch.float32)
        self.block_tables.index_fill_(0, slots, 0)
        self.features.index_fill_(0, slots, 0)
        # Read as soon as one row of the batch is biased, so an unbiased row must not keep what its slot had.
        self._bias_values.index_fill_(0, slots, 0.0)
        for admission in admissions:
            self._admit_vocabulary(admission, eos_token_ids)

    def _admit_vocabulary(self, admission: Admission, eos_token_ids: tuple[int, ...]) -> None:
        slot, params = admission.slot, admission.sampling
        if params.logit_bias:
            num_biases = len(params.logit_bias)
            self._bias_token_ids[slot, :num_biases] = self._row(
                [b[0] for b in params.logit_bias], torch.int64
            )
            self._bias_values[slot, :num_biases] = self._row([b[1] for b in params.logit_bias], torch.float32)
        if params.is_penalized:
            tokens = self._row(admission.tokens, torch.int64)
            self._prompt_mask[slot].zero_()
            self._prompt_mask[slot].index_fill_(0, tokens[: admission.num_prompt], True)
            counts = self._output_counts[slot].zero_()
            emitted = tokens[admission.num_prompt :]
            counts.scatter_add_(0, emitted, torch.ones_like(emitted, dtype=torch.int32))
        if params.min_tokens:
            stops = list(
                dict.fromkeys((*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)))
            )
            self._stop_token_ids[slot].fill_(-1)
            self._stop_token_ids[slot, : len(stops)] = self._row(stops, torch.int64)

    def grow(self, growths: Sequence[BlockGrowth]) -> None:
        """Append blocks to the tables of slots."""
        slots = [growth.slot for growth in growths for _ in growth.block_ids]
        columns = [growth.start_idx + i for growth in growths for i in range(len(growth.block_ids))]
        block_ids = [block_id for growth in growths for block_id in growth.block_ids]
        entries = self._row(slots + columns + block_ids, torch.int64).view(3, -1)
        self.block_tables[entries[0], entries[1]] = entries[2]

    def note_prefill(self, chunks: Sequence[PrefillChunk], token_ids: Tensor, features: Tensor) -> None:
        """Keep the last W tokens and features of every chunk, which lie side by side in token_ids [T] and
        features [T, F].
        """
        slots, columns, rows = [], [], []
        end_row = 0
        for chunk in chunks:
            size = len(chunk.token_ids)
            kept = range(max(0, size - self.window), size)
            slots += [chunk.slot] * len(kept)
            columns += [(chunk.start + i) % self.window for i in kept]
            rows += [end_row + i for i in kept]
            end_row += size
        entries = self._row(slots + columns + rows, torch.int64).view(3, -1)
        self.features[entries[0], entries[1]] = features[entries[2]]
        self.tokens[entries[0], entries[1]] = token_ids[entries[2]]

    def open(self, slots: Tensor, tree: TreeTensors, rows: StepRows) -> None:
        """Fill `rows` from the rows `slots` [B] of state."""
        self._ops.open(self, slots, tree, rows)

    def align(self, slots: Tensor, tree: TreeTensors, rows: StepRows, width: int) -> AlignWindow:
        """Open `rows` and return the last `width` positions of each, which count as cached in the draft from
        now on.
        """
        return self._ops.align(self, slots, tree, rows, width)

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
        return self._ops.commit(self, slots, rows, verification, features, block_size)

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
            is_sampled=flags.is_sampled,
            is_truncated=flags.is_truncated,
            is_penalized=flags.is_penalized,
            is_biased=flags.is_biased,
            has_min_tokens=flags.has_min_tokens,
        )

    def _rows(
        self, columns: Sequence[Sequence[int]] | Sequence[Sequence[float]], dtype: torch.dtype
    ) -> Tensor:
        return self._row([value for column in columns for value in column], dtype).view(len(columns), -1)

    def _row(self, values: Sequence[int] | Sequence[float], dtype: torch.dtype) -> Tensor:
        return upload(values, dtype, self.device)
