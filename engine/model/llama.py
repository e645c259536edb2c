"""The target network: a Llama decoder over a flat list of tokens.

Batching, caching and masking are left to the `Attend` passed to `forward`; sampling to `sampling`.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.decoder import Attend, DecoderLayer, LayerShape
from engine.layers.linear import PackedLinear, pack_linears
from engine.layers.norm import RMSNorm
from engine.layers.ops import LayerOps, TorchOps
from engine.layers.rotary import Rotary
from engine.layers.tuned_linear import WideLinear
from engine.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """hidden: [T, H], after the final norm, the input of the head. features: [T, num_taps * H]; empty without
    taps.
    """

    hidden: Tensor
    features: Tensor


def layer_shape(config: ModelConfig) -> LayerShape:
    """Return the decoder layer sizes of a target."""
    return LayerShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        input_size=config.hidden_size,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )


class LlamaForCausalLM(nn.Module):
    """A Llama-family target.

    `taps` says which hidden states are the draft's features: tap i < num_layers is the residual stream
    *after* layer i, tap num_layers is the state after the final norm. `num_positions` sizes the rotary table.
    """

    def __init__(
        self, config: ModelConfig, taps: tuple[int, ...] = (), *, num_positions: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.config = config
        self.taps = taps
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(layer_shape(config)) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.fast_head: PackedLinear | WideLinear | None = None
        self.ops: LayerOps = TorchOps()
        self.to(dtype)
        self.rotary = Rotary(config.head_dim, config.rope_theta, config.rope_scaling, num_positions, dtype)

    @property
    def head_weight(self) -> Tensor:
        """The output head, [V, H]; the embedding itself where they are tied."""
        return self.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> TargetOutput:
        """Run T tokens, `token_ids` and `positions` [T] int64, through every layer; an id below 0, padding,
        counts as token 0.
        """
        layers = cast("list[DecoderLayer]", self.layers)
        norm, *next_norms = *(layer.input_norm for layer in layers), self.norm
        rows, table = self.embed_tokens.weight, self.rotary.table
        x, residual, angles = self.ops.embed(token_ids, positions, rows, table, norm.weight, norm.eps)
        tapped: dict[int, Tensor] = {}
        for layer_idx, (layer, norm) in enumerate(zip(layers, next_norms, strict=True)):
            delta, residual = layer.forward(x, residual, angles, attend, layer_idx, self.ops)
            x, residual = self.ops.add_norm(delta, residual, norm.weight, norm.eps)
            if layer_idx in self.taps:
                tapped[layer_idx] = residual[:, : x.shape[1]]
        tapped[len(layers)] = x
        features = [tapped[tap] for tap in self.taps] or [x[:, :0]]
        return TargetOutput(x, torch.cat(features, dim=-1))

    def use(self, ops: LayerOps) -> None:
        """Run on other ops than torch's, such as the kernels of a GPU."""
        self.ops = ops

    def pack(self) -> None:
        """Reorder the weights for a CPU that `can_pack`; embedding and output head stay readable too."""
        pack_linears(self.layers)
        self.fast_head = PackedLinear(self.head_weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [..., V] in the model's dtype, or a GPU's in float32, for hidden [..., H]."""
        if self.fast_head is not None:
            return self.fast_head.forward(hidden)
        return F.linear(hidden, self.head_weight)
