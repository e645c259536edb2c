"""The draft network: an EAGLE head that predicts the token after next from a token and a target feature.

Walking a tree with it is left to `drafter`.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.draft.config import DraftConfig
from engine.draft.pairs import HeadInput
from engine.layers.decoder import Attend, DecoderLayer
from engine.layers.linear import PackedLinear, pack_linears
from engine.layers.norm import RMSNorm
from engine.layers.ops import LayerOps, TorchOps
from engine.layers.rotary import Rotary


class DraftHead(nn.Module):
    """EAGLE-3 head (arXiv 2503.01840) with 1 to 3 layers.

    At position j it reads the pair (feature of position j - 1, token at j) and predicts the token at j + 1. A
    feature is either `fuse`d from the target's taps, or the head's own output of the step before. The
    embedding and the output rows are the target's, given by `bind` and never trained or stored here, but for
    heads made elsewhere that bring their own.
    """

    def __init__(self, config: DraftConfig, *, num_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        num_tap_norms = {"none": 0, "joint": 1, "each": len(config.taps)}[config.tap_norm]
        self.tap_norms = nn.ModuleList(
            RMSNorm(config.feature_size // num_tap_norms, config.rms_norm_eps) for _ in range(num_tap_norms)
        )
        self.feature_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(config.layer_shape(idx)) for idx in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.packed_head: PackedLinear | None = None
        self.ops: LayerOps = TorchOps()
        self.to(dtype)
        self.rotary = Rotary(config.head_dim, config.rope_theta, config.rope_scaling, num_positions, dtype)
        self.register_buffer("target_ids", torch.arange(config.draft_vocab_size))
        for name, num_rows, is_own in (
            ("embed_rows", config.target_vocab_size, config.has_own_embedding),
            ("head_rows", config.draft_vocab_size, config.has_own_head),
        ):
            rows = torch.zeros(num_rows * is_own, config.hidden_size, dtype=dtype)
            self.register_buffer(name, rows, persistent=is_own)
        self.target_ids: Tensor  # [draft_vocab_size] int64: the target's id of each draft token
        self.embed_rows: Tensor
        self.head_rows: Tensor

    def bind(self, embedding: Tensor, head: Tensor) -> None:
        """Share the target's embedding [V, H] and copy the drafted rows of its output head [V, H].

        Rows of the head's own stay.
        """
        if not self.config.has_own_embedding:
            self.embed_rows = embedding.detach()
        if not self.config.has_own_head:
            self.head_rows = head.detach()[self.target_ids].contiguous()

    def pack(self) -> None:
        """Reorder the weights of a bound head for a CPU that `can_pack`; it can no longer be trained."""
        pack_linears(self)
        self.packed_head = PackedLinear(self.head_rows)

    def fuse(self, features: Tensor) -> Tensor:
        """Return [..., H] from the target's taps [..., num_taps * H]."""
        if self.tap_norms:
            norms = cast("list[RMSNorm]", self.tap_norms)
            parts = zip(norms, features.chunk(len(norms), dim=-1), strict=True)
            features = torch.cat([self.ops.norm(part, norm.weight, norm.eps) for norm, part in parts], -1)
        fused: Tensor = self.fc(features)
        return fused

    def forward(
        self, token_ids: Tensor, features: Tensor, positions: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Run T pairs: token_ids [T] int64 (target ids), features [T, H], positions [T] int64.

        Returns (feature for the next draft step [T, H], hidden [T, H] for `logits`).
        """
        return self.run(self.open(token_ids, features, positions), attend)

    @property
    def pair_norms(self) -> tuple[RMSNorm, RMSNorm]:
        """The norms of a pair's token and of its feature."""
        return cast("list[DecoderLayer]", self.layers)[0].input_norm, self.feature_norm

    def open(self, token_ids: Tensor, features: Tensor, positions: Tensor) -> HeadInput:
        """Return what the layers read of T pairs."""
        norm, own = self.pair_norms
        embedded = F.embedding(token_ids, self.embed_rows)
        normed = (
            self.ops.norm(embedded, norm.weight, norm.eps),
            self.ops.norm(features, own.weight, own.eps),
        )
        return HeadInput(
            x=torch.cat(normed, dim=-1),
            residual=normed[1] if self.config.is_residual_normed else features,
            angles=self.rotary(positions),
        )

    def run(self, pairs: HeadInput, attend: Attend) -> tuple[Tensor, Tensor]:
        """Return what `forward` does, given what `open` returned."""
        x, residual = pairs.x, pairs.residual
        layers = cast("list[DecoderLayer]", self.layers)
        next_norms = *(layer.input_norm for layer in layers[1:]), self.norm
        for layer_idx, (layer, norm) in enumerate(zip(layers, next_norms, strict=True)):
            delta, residual = layer.forward(x, residual, pairs.angles, attend, layer_idx, self.ops)
            x, residual = self.ops.add_norm(delta, residual, norm.weight, norm.eps)
        return (x if self.config.is_feedback_normed else residual), x

    def use(self, ops: LayerOps) -> None:
        """Run on other ops than torch's, such as the kernels of a GPU; training needs torch's."""
        self.ops = ops

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [..., draft_vocab_size] over the draft's vocabulary."""
        if self.packed_head is not None:
            return self.packed_head.forward(hidden)
        return F.linear(hidden, self.head_rows)
