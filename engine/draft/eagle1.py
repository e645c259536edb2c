"""The draft network of EAGLE-1 (arXiv 2401.15077): it predicts the target's next hidden state.

Heads over several taps are in `head`; walking a tree with either is left to `drafter`.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.draft.config import DraftConfig
from engine.draft.pairs import HeadInput
from engine.layers.decoder import Attend, DecoderLayer
from engine.layers.linear import PackedLinear, pack_linears
from engine.layers.ops import LayerOps, TorchOps
from engine.layers.rotary import Rotary


class Eagle1Head(nn.Module):
    """EAGLE-1 head with 1 to 3 dense layers, used as `DraftHead` is.

    At position j it reads (target hidden state of position j - 1, token at j), joined by a linear layer; the
    first decoder layer has no input norm, and nothing is normed at the end: what comes out stands for the
    target's hidden state of position j, which its output rows turn into logits.
    """

    def __init__(self, config: DraftConfig, *, num_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.has_fc_bias)
        self.layers = nn.ModuleList(DecoderLayer(config.layer_shape(idx)) for idx in range(config.num_layers))
        del self.layers[0].input_norm
        self.packed_head: PackedLinear | None = None
        self.ops: LayerOps = TorchOps()
        self.to(dtype)
        self.rotary = Rotary(config.head_dim, config.rope_theta, config.rope_scaling, num_positions, dtype)
        self.register_buffer("target_ids", torch.arange(config.draft_vocab_size))
        self.register_buffer("embed_rows", torch.empty(0), persistent=False)
        self.register_buffer("head_rows", torch.empty(0), persistent=False)
        self.target_ids: Tensor  # [draft_vocab_size] int64: the target's id of each draft token
        self.embed_rows: Tensor
        self.head_rows: Tensor

    def bind(self, embedding: Tensor, head: Tensor) -> None:
        """Share the target's embedding [V, H] and copy the drafted rows of its output head [V, H]."""
        self.embed_rows = embedding.detach()
        self.head_rows = head.detach()[self.target_ids].contiguous()

    def pack(self) -> None:
        """Reorder the weights of a bound head for a CPU that `can_pack`; it can no longer be trained."""
        pack_linears(self)
        self.packed_head = PackedLinear(self.head_rows)

    def use(self, ops: LayerOps) -> None:
        """Run on other ops than torch's, such as the kernels of a GPU; training needs torch's."""
        self.ops = ops

    def fuse(self, features: Tensor) -> Tensor:
        """Return the target's hidden state [..., H] as it is: the only tap."""
        return features

    def forward(
        self, token_ids: Tensor, features: Tensor, positions: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Run T pairs: token_ids [T] int64 (target ids), features [T, H], positions [T] int64.

        Returns the predicted hidden state [T, H] twice: for the next draft step and for `logits`.
        """
        return self.run(self.open(token_ids, features, positions), attend)

    @property
    def pair_norms(self) -> None:
        """Neither half of a pair is normed."""

    def open(self, token_ids: Tensor, features: Tensor, positions: Tensor) -> HeadInput:
        """Return what the layers read of T pairs."""
        embedded = F.embedding(token_ids, self.embed_rows)
        return HeadInput(torch.cat((embedded, features), dim=-1), features, self.rotary(positions))

    def run(self, pairs: HeadInput, attend: Attend) -> tuple[Tensor, Tensor]:
        """Return what `forward` does, given what `open` returned; the stream begins with the joined pair."""
        first, *others = cast("list[DecoderLayer]", self.layers)
        x = self.fc(pairs.x)
        delta, residual = first.forward(x, x, pairs.angles, attend, 0, self.ops)
        for layer_idx, layer in enumerate(others, start=1):
            norm = layer.input_norm
            x, residual = self.ops.add_norm(delta, residual, norm.weight, norm.eps)
            delta, residual = layer.forward(x, residual, pairs.angles, attend, layer_idx, self.ops)
        hidden = residual + delta
        return hidden, hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [..., draft_vocab_size] over the draft's vocabulary."""
        if self.packed_head is not None:
            return self.packed_head.forward(hidden)
        return F.linear(hidden, self.head_rows)
