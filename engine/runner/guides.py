"""The grammars of the running rows: each row's matcher follows what the device emits, and masks its trees.

The host learns what a step emitted one step late; but a guided step waits for its own drafts, and by then the
answer of the step before is on the host too, so that guided rows are planned like all others. Which rows run
is left to the scheduler, the laws of a grammar to `grammar`.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch import Admission, DecodeRow
from engine.errors import RequestError, StepError
from engine.grammar.backend import OpenBackend
from engine.grammar.matcher import CompiledGrammar, GrammarBackend, Matcher
from engine.grammar.token_mask import TokenBits, forbid, mask_width
from engine.grammar.tree_walk import TreeWalk
from engine.guidance import Grammar
from engine.request import SamplingParams
from engine.runner.host_copy import HostCopy, read_answer
from engine.speculation import upload
from engine.tree.topology import TreeTopology

logger = logging.getLogger(__name__)

DEAD_END = "the grammar came to a dead end: no token of this model may follow, and the answer may not end"
BROKEN = "the grammar of this request failed; the log has the reason"
_MAX_LOADED = 256


class Guides:
    """The matchers of all slots. `open_backend` is called for the first grammar that is asked for."""

    def __init__(self, open_backend: OpenBackend, vocab_size: int, device: torch.device) -> None:
        self._open_backend = open_backend
        self._backend: GrammarBackend | None = None
        self._bits = TokenBits(vocab_size, device)
        self._num_words = mask_width(vocab_size)
        self._loaded: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._rows: dict[int, GuidedRow] = {}

    def check(self, sampling: SamplingParams) -> None:
        """Load the grammar of a request, where it has one. Raises `RequestError` for one that cannot be
        followed.
        """
        grammar = sampling.grammar
        if grammar is None:
            return
        for name, is_asked in (("min_tokens", sampling.min_tokens > 0), ("ignore_eos", sampling.ignore_eos)):
            if is_asked:
                raise RequestError(f"{name} excludes a grammar, which says where an answer ends", name)
        self._load(grammar)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Begin the rows of the slots that sequences take, behind what they have emitted before."""
        for admission in admissions:
            grammar = admission.sampling.grammar
            if grammar is None:
                self._rows.pop(admission.slot, None)
            else:
                matcher = self._load(grammar).matcher()
                self._rows[admission.slot] = GuidedRow(matcher, admission.tokens, admission.num_prompt)

    def open(self, rows: Sequence[DecodeRow]) -> "GuidedStep | None":
        """Return the guided rows of a step, None where it has none."""
        if not self._rows:
            return None
        guided = {
            idx: (self._rows[row.slot], row.topology)
            for idx, row in enumerate(rows)
            if row.slot in self._rows
        }
        return GuidedStep(guided, self._bits, self._num_words) if guided else None

    def _load(self, grammar: Grammar) -> CompiledGrammar:
        if grammar in self._loaded:
            self._loaded.move_to_end(grammar)
            return self._loaded[grammar]
        if self._backend is None:
            self._backend = self._open_backend()
        loaded = self._backend.load(grammar.compiled or self._backend.compile(grammar))
        self._loaded[grammar] = loaded
        if len(self._loaded) > _MAX_LOADED:
            self._loaded.popitem(last=False)
        return loaded


class GuidedRow:
    """One row's matcher, and what the row has emitted that the matcher has not seen."""

    def __init__(self, matcher: Matcher, tokens: Sequence[int], num_prompt: int) -> None:
        self.matcher = matcher
        self.is_broken = False
        self._root = tokens[num_prompt - 1]
        self._unseen: tuple[Tensor, int] | None = None
        self._take(tokens[num_prompt:])

    def note(self, answer: Tensor, row_idx: int) -> None:
        """Remember a step's answer, which is on the host once the device has done it."""
        self._unseen = (answer, row_idx)

    def catch_up(self, root: int) -> None:
        """Take what was emitted; `root` is where the device says that it has come."""
        if self._unseen is not None:
            answer, row_idx = self._unseen
            self._unseen = None
            result = read_answer(answer[row_idx].tolist())
            if not result.is_finite:
                self.is_broken = True  # and the host will hear of it
                return
            self._take(result.token_ids)
        if root != self._root:
            raise StepError(f"the device stands at token {root}, the grammar at {self._root}")

    def _take(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            # Behind the end of the text the step in flight says what it likes: nobody reads it.
            if not self.matcher.is_finished and not self.matcher.advance(token_id):
                raise StepError(f"the grammar refuses token {token_id}, which was emitted")
            self._root = token_id


class GuidedStep:
    """The guided rows of one step, by their place in the batch. It masks drafts, then the target's logits."""

    def __init__(
        self, rows: dict[int, tuple[GuidedRow, TreeTopology]], bits: TokenBits, num_words: int
    ) -> None:
        self._bits = bits
        self._rows = rows
        self._walks = {
            idx: TreeWalk(row.matcher, topology, num_words) for idx, (row, topology) in rows.items()
        }
        self._num_words = num_words
        self._num_walked = 0
        self._masks: dict[tuple[int, int], Tensor] = {}
        self._copy: HostCopy | None = None
        self._raw: tuple[Tensor, Tensor] | None = None

    def mask_draft(self, depth: int, logits: Tensor, target_ids: Tensor, token_ids: Tensor) -> None:
        """See `DraftGuide`. The host waits for the drafts of the level above."""
        self._walk(depth, token_ids.tolist())
        width = logits.shape[0] // token_ids.shape[0]
        found: dict[int, Tensor] = {}
        for (idx, node), mask in self._masks.items():
            level = self._level(idx, depth)
            if node in level:
                found[idx * width + node - level.start] = mask
        if not found:
            return
        is_allowed = self._bits.unpack(torch.stack([*found.values()]))[:, target_ids]
        # Where no draft token is allowed any will do: none of them is accepted.
        is_allowed |= ~is_allowed.any(1, keepdim=True)
        forbid(logits, upload([*found], torch.int64, logits.device), is_allowed)

    def read(self, token_ids: Tensor) -> None:
        """Begin to copy the drafts [B, N] to the host, behind all that was enqueued before."""
        self._copy = HostCopy(token_ids)

    def mask_target(self, logits: Tensor) -> None:
        """Write -inf where a grammar allows no token, into logits [B, N, V], once the drafts are here."""
        assert self._copy is not None, "drafts are read before the target runs"
        drafts: list[list[int]] = self._copy.wait().tolist()
        self._walk(logits.shape[1], drafts)
        if not self._masks:
            return
        places = [idx * logits.shape[1] + node for idx, node in self._masks]
        rows = upload(places, torch.int64, logits.device)
        self._raw = (rows, logits.flatten(0, 1)[rows])
        is_allowed = self._bits.unpack(torch.stack([*self._masks.values()]))
        forbid(logits.flatten(0, 1), rows, is_allowed)

    def unmask_target(self, logits: Tensor) -> None:
        """Put back what `mask_target` overwrote, once the tokens are drawn: logprobs are of raw logits."""
        if self._raw is not None:
            rows, raw = self._raw
            logits.flatten(0, 1)[rows] = raw

    def note(self, answer: Tensor) -> None:
        """Let the rows read what they emit from `answer` [B, 2 D + 5], whose copy to the host is enqueued."""
        for idx, (row, _) in self._rows.items():
            row.note(answer, idx)

    def reasons(self) -> dict[int, str]:
        """Return why rows failed, where their logits turn out not to be finite."""
        broken = {idx: BROKEN for idx, (row, _) in self._rows.items() if row.is_broken}
        return {idx: DEAD_END for idx, walk in self._walks.items() if walk.has_dead_end} | broken

    def _level(self, idx: int, depth: int) -> range:
        """Return the nodes at `depth` of the tree of row `idx`."""
        levels = self._rows[idx][1].levels
        return levels[depth] if depth < len(levels) else range(0)

    def _walk(self, depth: int, drafts: list[list[int]]) -> None:
        """Find the masks of all nodes down to `depth`. A row whose grammar fails allows nothing more."""
        for idx, (row, topology) in self._rows.items():
            try:
                if self._num_walked == 0 and not row.is_broken:
                    row.catch_up(drafts[idx][0])
                for level in range(self._num_walked, min(depth, topology.depth) + 1):
                    if not row.is_broken:
                        masks = self._walks[idx].level(level, drafts[idx])
                        self._masks |= {(idx, node): mask for node, mask in masks.items()}
            except Exception:  # the edge of one row: whatever it was, the others go on
                logger.exception("grammar failed row=%d", idx)
                row.is_broken = True
            if row.is_broken:
                self._masks[idx, 0] = torch.zeros(self._num_words, dtype=torch.int32)
        self._num_walked = max(self._num_walked, depth + 1)
