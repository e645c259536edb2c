"""Device state of the running sequences, one row per slot, written by patches before a step and by commits
after it.

It is why the host can be a step late: lengths, last tokens and features never leave the device. Slot 0 is the
dummy.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch import DUMMY_SLOT, Admission, BlockGrowth, PrefillChunk
from engine.draft.drafter import AlignWindow
from engine.request import MAX_LOGIT_BIASES, MAX_STOP_TOKENS
from engine.speculation import SamplingFlags, SamplingTensors, Verification, upload


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
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=device)

        self.window = window
        self.device = device
        self.seq_len, self.root_token, self.draft_len, self.draft_start = zeros(), zeros(), zeros(), zeros()
        self.block_tables = zeros(table_width)
        self.features = zeros(window + 1, feature_size, dtype=dtype)
        self.tokens = zeros(window + 1)
        self._seed, self._stop_from, self._top_k = zeros(), zeros(), zeros()
        # temperature, top_p, min_p, repetition, presence and frequency penalty, side by side: one gather
        # reads all.
        self._numbers = zeros(6, dtype=torch.float32)
        self._bias_token_ids = zeros(MAX_LOGIT_BIASES)
        self._bias_values = zeros(MAX_LOGIT_BIASES, dtype=torch.float32)
        self._stop_token_ids = zeros(MAX_STOP_TOKENS)
        self._prompt_mask = zeros(vocab_size, dtype=torch.bool)
        self._output_counts = zeros(vocab_size, dtype=torch.int32)

    def admit(self, admissions: Sequence[Admission], eos_token_ids: tuple[int, ...]) -> None:
        """Set every row of the slots that sequences take."""
        numbers = [
            value
            for a in admissions
            for value in (
                a.sampling.temperature,
                a.sampling.top_p,
                a.sampling.min_p,
                a.sampling.repetition_penalty,
                a.sampling.presence_penalty,
                a.sampling.frequency_penalty,
            )
        ]
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
        ints = self._row([value for column in columns for value in column], torch.int64)
        slots, root_position, root_token, draft_start, seed, top_k, stop_from = ints.view(len(columns), -1)
        self.seq_len[slots] = root_position
        self.draft_len[slots] = root_position
        self.root_token[slots] = root_token
        self.draft_start[slots] = draft_start
        self._seed[slots], self._top_k[slots], self._stop_from[slots] = seed, top_k, stop_from
        self._numbers[slots] = self._row(numbers, torch.float32).view(len(admissions), -1)
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

    def align_window(self, slots: Tensor, width: int, block_tables: Tensor) -> AlignWindow:
        """Return the last `width` positions of rows `slots` [B], and count them as cached in the draft from
        now on.
        """
        root = self.seq_len[slots]
        draft_len, draft_start = self.draft_len[slots], self.draft_start[slots]
        first = torch.maximum(draft_len, root + 1 - width).minimum(root)
        # Positions between draft_len and first have no draft K/V and never will: the window starts after that
        # hole.
        start = torch.where(first > draft_len, first, draft_start)
        positions = root[:, None] + torch.arange(1 - width, 1, device=self.device)
        rows = slots[:, None]
        self.draft_len[slots] = root + 1
        self.draft_start[slots] = start
        return AlignWindow(
            positions=positions,
            is_pending=positions >= first[:, None],
            token_ids=torch.cat(
                (self.tokens[rows, positions[:, :-1] % self.window], self.root_token[rows]), dim=1
            ),
            features=self.features[rows, (positions - 1) % self.window],
            prefix_start=start,
            prefix_end=first,
            block_tables=block_tables,
        )

    def commit(
        self, slots: Tensor, verification: Verification, path_features: Tensor, is_penalized: bool
    ) -> None:
        """Advance rows `slots` [B] by what was emitted; path_features: [B, D + 1, F] along the accepted
        path.
        """
        num_accepted = verification.num_accepted[:, None]
        step = torch.arange(verification.path.shape[1], device=self.device)
        is_kept = step <= num_accepted
        positions = self.seq_len[slots][:, None] + step
        rows = slots[:, None]
        token_ids = verification.token_ids.clamp(min=0)
        columns = torch.where(is_kept, positions % self.window, self.window)
        self.features[rows, columns] = path_features
        self.tokens[rows, columns] = torch.cat((self.root_token[rows], token_ids[:, :-1]), dim=1)
        self.seq_len[slots] += verification.num_accepted + 1
        self.root_token[slots] = verification.next_token
        self.seq_len[DUMMY_SLOT].zero_()  # an assignment would copy the number from the host
        if is_penalized:
            counts = is_kept.to(torch.int32)
            self._output_counts.index_put_((rows.expand_as(token_ids), token_ids), counts, accumulate=True)

    def sampling(self, slots: Tensor, flags: SamplingFlags) -> SamplingTensors:
        """Gather how rows `slots` [B] draw."""
        nothing = slots[:, None][:, :0]
        numbers = self._numbers[slots]
        return SamplingTensors(
            temperature=numbers[:, 0],
            top_k=self._top_k[slots],
            top_p=numbers[:, 1],
            min_p=numbers[:, 2],
            repetition_penalty=numbers[:, 3],
            presence_penalty=numbers[:, 4],
            frequency_penalty=numbers[:, 5],
            seed=self._seed[slots],
            bias_token_ids=self._bias_token_ids[slots] if flags.is_biased else nothing,
            bias_values=self._bias_values[slots] if flags.is_biased else nothing.float(),
            prompt_mask=self._prompt_mask[slots] if flags.is_penalized else nothing.bool(),
            output_counts=self._output_counts[slots] if flags.is_penalized else nothing.int(),
            stop_token_ids=self._stop_token_ids[slots] if flags.has_min_tokens else nothing,
            stop_from=self._stop_from[slots],
            is_sampled=flags.is_sampled,
            is_truncated=flags.is_truncated,
            is_penalized=flags.is_penalized,
            is_biased=flags.is_biased,
            has_min_tokens=flags.has_min_tokens,
        )

    def _row(self, values: Sequence[int] | Sequence[float], dtype: torch.dtype) -> Tensor:
        return upload(values, dtype, self.device)
