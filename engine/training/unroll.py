"""The training-time test of EAGLE-3 (arXiv 2503.01840): the head runs on its own outputs as it will when
drafting, for every position at once.

Losses are left to `losses`, the trees that the ranks would accept to `evaluate`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from engine.draft.network import DraftNetwork
from engine.layers.rotary import Angles, rotate_qkv
from engine.training.packed_attention import Diagonal, Documents, attend_packed


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """A batch of packed documents, flat. token_ids, positions: [T] int64; is_answer: [T] bool."""

    token_ids: Tensor
    positions: Tensor
    is_answer: Tensor
    documents: Documents


def unroll(head: DraftNetwork, tokens: PackedTokens, features: Tensor, num_steps: int) -> Iterator[Tensor]:
    """Yield the hidden states [T, H] of each draft step, given the target's taps `features` [T, taps * H].

    Row j of step s is a draft whose root is token j: it has read tokens j .. j + s, and predicts token
    j + s + 1. Step 0 reads (feature of j - 1, token j), where a document's first token reads a zero feature,
    and sees the step-0 keys up to j. Step s > 0 reads (own output of step s - 1, token j + s) at position
    j + s, and sees step-0 keys up to j, then its own keys of steps 1 .. s. Rows whose tokens run past their
    document hold no meaning: mask them with `is_drafted`.
    """
    documents = tokens.documents
    if not head.config.has_first_pair:
        # The pair at a text's first token becomes a document of its own, which no other sees.
        positions = (tokens.positions - 1).clamp(min=0)
        documents = Documents.from_positions(positions, documents.max_length)
    cache = _DraftKeys(documents, head.config.num_layers, head.config.num_kv_heads)
    features = features.roll(1, 0).masked_fill((tokens.positions == 0)[:, None], 0.0)
    feature = head.fuse(features)
    for step in range(num_steps):
        token_ids = tokens.token_ids.roll(-step, 0)
        feature, hidden = head(token_ids, feature, tokens.positions + step, cache.attend)
        yield hidden


class _DraftKeys:
    """The keys a draft step has left per layer: those of step 0, then one diagonal per later step."""

    def __init__(self, documents: Documents, num_layers: int, num_kv_heads: int) -> None:
        self.documents = documents
        self.num_kv_heads = num_kv_heads
        self.pairs: list[list[Diagonal]] = [[] for _ in range(num_layers)]

    def attend(self, layer_idx: int, qkv: Tensor, angles: Angles) -> Tensor:
        q, k, v = rotate_qkv(qkv, angles, self.num_kv_heads)
        pairs = self.pairs[layer_idx]
        pairs.append((k, v))
        return attend_packed(q, *pairs[0], pairs[1:], self.documents)


def is_drafted(tokens: PackedTokens, step: int) -> Tensor:
    """Return [T] bool: is token j + step + 1 of root j in the same document, and an answer?"""
    shift = step + 1
    is_same = tokens.positions.roll(-shift, 0) == tokens.positions + shift
    is_same[-shift:] = False
    return is_same & tokens.is_answer.roll(-shift, 0)
