"""Acceptance of a draft head, measured without decoding: ranks along known answers, and the trees on them.

At temperature 0 a tree accepts exactly the nodes whose ranks spell the target's own continuation, so the
ranks of a teacher-forced unroll along greedy answers simulate every topology exactly. Searching trees is
left to `engine/tree/search`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.draft.network import DraftNetwork
from engine.model.llama import LlamaForCausalLM
from engine.training.dataset import Conversations
from engine.training.packed_attention import Documents, attend_documents
from engine.training.unroll import PackedTokens, is_drafted, unroll
from engine.training.vocab_select import invert
from engine.tree.topology import TreeTopology

OUTSIDE = 1 << 30  # the rank of a token that the draft cannot write, or that lies past the answer's end
_CHUNK = 1024  # rows whose logits exist at a time


@dataclass(frozen=True, slots=True)
class AcceptanceProfile:
    """counts[d][r]: roots whose token at depth d + 1 had rank r; totals[d]: roots that got so far.

    A root gets to depth d + 1 where the tokens before it all had ranks under the number of ranks counted.
    """

    counts: tuple[tuple[int, ...], ...]
    totals: tuple[int, ...]

    @staticmethod
    def measure(answers: Sequence[Tensor], num_ranks: int) -> "AcceptanceProfile":
        """Count over every token of `answers` as a root; ranks [n, D] as `measure_ranks` gives them."""
        ranks = torch.cat(list(answers))
        remaining = torch.cat([torch.arange(len(answer), 0, -1) for answer in answers])
        counts, totals = [], []
        is_alive = torch.ones(len(ranks), dtype=torch.bool)
        for depth in range(ranks.shape[1]):
            is_alive = is_alive & (remaining > depth)
            totals.append(int(is_alive.sum()))
            is_alive = is_alive & (ranks[:, depth] < num_ranks)
            counts.append(tuple(torch.bincount(ranks[is_alive, depth], minlength=num_ranks).tolist()))
        return AcceptanceProfile(tuple(counts), tuple(totals))

    @property
    def probabilities(self) -> tuple[tuple[float, ...], ...]:
        """Acceptance of each rank given that its parent was accepted, by depth, non-increasing in rank."""
        return tuple(
            tuple(sorted((count / max(total, 1) for count in row), reverse=True))
            for row, total in zip(self.counts, self.totals, strict=True)
        )


def tokens_per_call(answers: Sequence[Tensor], topology: TreeTopology) -> float:
    """Return the tokens emitted per target call if `topology` decoded all `answers`, given as ranks [n, D].

    The first token of an answer comes from its first call, as in decoding. A tree deeper than D is cut at D.
    """
    calls = sum(count_calls(ranks.tolist(), topology) for ranks in answers)
    return sum(len(ranks) for ranks in answers) / max(calls, 1)


def count_calls(ranks: Sequence[Sequence[int]], topology: TreeTopology) -> int:
    """Return the target calls that decode one answer: each emits its accepted path and one token more."""
    root = num_calls = 0
    while root < len(ranks):
        node = 0
        for rank in ranks[root]:
            children = topology.children[node]
            if rank >= len(children):
                break
            node = children[rank]
        root += topology.depths[node] + 1
        num_calls += 1
    return num_calls


@torch.no_grad()
def measure_ranks(
    target: LlamaForCausalLM,
    head: DraftNetwork,
    conversations: Conversations,
    depth: int,
    batch_tokens: int = 16384,
) -> list[Tensor]:
    """Return, for every answer in order, ranks [n, depth] int64 on the CPU.

    Row i belongs to the root before the answer's token i; column d is the rank of token i + d among the
    head's logits after the draft has read tokens up to i + d - 1. The answers should be greedy ones.
    """
    draft_ids = invert(head.target_ids, head.config.target_vocab_size)
    answers: list[Tensor] = []
    for tokens in _batches(conversations, batch_tokens, head.target_ids.device):
        attend = attend_documents(tokens.documents, target.config.num_kv_heads)
        features = target(tokens.token_ids, tokens.positions, attend).features
        is_answer = torch.ones_like(tokens.is_answer)
        columns = []
        for step, hidden in enumerate(unroll(head, tokens, features, depth)):
            is_answer = is_answer & is_drafted(tokens, step)
            labels = draft_ids[tokens.token_ids.roll(-step - 1, 0)]
            rank = _ranks(hidden, head.head_rows, labels)
            columns.append(torch.where(is_answer & (labels >= 0), rank, OUTSIDE))
        answers += _split_answers(torch.stack(columns, 1).cpu(), is_drafted(tokens, 0).cpu())
    return answers


@torch.no_grad()
def measure_perfect_ranks(
    target: LlamaForCausalLM, conversations: Conversations, depth: int, batch_tokens: int = 16384
) -> list[Tensor]:
    """Return what `measure_ranks` would for a draft that ranks tokens as the target does: a ceiling.

    At temperature 0 every rank is 0; at others the target itself does not follow its best token.
    """
    answers: list[Tensor] = []
    for tokens in _batches(conversations, batch_tokens, target.head_weight.device):
        attend = attend_documents(tokens.documents, target.config.num_kv_heads)
        hidden = target(tokens.token_ids, tokens.positions, attend).hidden
        rank = _ranks(hidden, target.head_weight, tokens.token_ids.roll(-1, 0))
        is_answer = torch.ones_like(tokens.is_answer)
        columns = []
        for step in range(depth):
            is_answer = is_answer & is_drafted(tokens, step)
            columns.append(torch.where(is_answer, rank.roll(-step, 0), OUTSIDE))
        answers += _split_answers(torch.stack(columns, 1).cpu(), is_drafted(tokens, 0).cpu())
    return answers


def _batches(conversations: Conversations, batch_tokens: int, device: torch.device) -> Iterator[PackedTokens]:
    """Yield runs of whole conversations of at most `batch_tokens`, a longer one alone."""
    start, lengths = 0, conversations.lengths.tolist()
    ends = conversations.lengths.cumsum(0).tolist()
    while start < len(lengths):
        stop, first = start + 1, ends[start] - lengths[start]
        while stop < len(lengths) and ends[stop] - first <= batch_tokens:
            stop += 1
        part = slice(first, ends[stop - 1])
        positions = torch.cat([torch.arange(length) for length in lengths[start:stop]])
        documents = Documents.from_positions(positions, max(lengths[start:stop]))
        yield PackedTokens(
            conversations.token_ids[part].long().to(device),
            positions.to(device),
            conversations.is_answer[part].to(device),
            Documents(documents.offsets.to(device), documents.max_length),
        )
        start = stop


def _ranks(hidden: Tensor, head_rows: Tensor, labels: Tensor) -> Tensor:
    """Return how many logits beat the label's, [T] int64, a chunk of rows at a time."""
    ranks = []
    for start in range(0, len(hidden), _CHUNK):
        rows = slice(start, start + _CHUNK)
        scores = F.linear(hidden[rows], head_rows)
        ranks.append((scores > scores.gather(1, labels[rows].clamp(min=0)[:, None])).sum(-1))
    return torch.cat(ranks)


def _split_answers(ranks: Tensor, is_root: Tensor) -> list[Tensor]:
    """Cut ranks [T, D] into the runs where `is_root` [T] bool holds."""
    padded = torch.cat((torch.zeros(1, dtype=torch.bool), is_root, torch.zeros(1, dtype=torch.bool))).int()
    change = padded.diff()
    starts, ends = (change == 1).nonzero()[:, 0].tolist(), (change == -1).nonzero()[:, 0].tolist()
    return [ranks[start:end] for start, end in zip(starts, ends, strict=True)]
